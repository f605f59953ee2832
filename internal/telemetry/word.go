package telemetry

import "strings"

// Word is a word that metrics, logs, placeholders or headers show, and what documentation adds to it.
type Word struct{ Name, Meaning string }

// Listed lists words as documentation does: "`a`, `b` (its meaning) or `c`".
func Listed(words []Word) string {
	var b strings.Builder
	for i, w := range words {
		switch {
		case i == 0:
		case i == len(words)-1:
			b.WriteString(" or ")
		default:
			b.WriteString(", ")
		}
		b.WriteString("`" + w.Name + "`")
		if w.Meaning != "" {
			b.WriteString(" (" + w.Meaning + ")")
		}
	}
	return b.String()
}
