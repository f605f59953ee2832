package option

import (
	"slices"
	"strings"
)

// DidYouMean returns the end of an error about an unknown word: the known word that
// was probably meant, or "" if there is none.
func DidYouMean(word string, known []string) string {
	if near := Nearest(word, known); near != "" {
		return ", did you mean " + near + "?"
	}
	return ""
}

// Nearest returns the known word of which word is probably a misspelling or another
// form, and "" if none is near. Case, - and _ make no difference.
func Nearest(word string, known []string) string {
	plain := plainWord(word)
	best, least := "", len(plain)
	for _, candidate := range known {
		if d := Slips(plain, plainWord(candidate)); d < least {
			best, least = candidate, d
		}
	}
	// One slip in three letters: with more of them it is another word.
	if least <= max(len(plain)/3, 1) {
		return best
	}
	if near := only(known, func(candidate string) bool {
		other := plainWord(candidate)
		return len(plain) > 1 && strings.HasPrefix(other, plain) || strings.HasPrefix(plain, other)
	}); near != "" {
		return near
	}
	parts := strings.FieldsFunc(strings.ToLower(word), func(r rune) bool { return r == '_' || r == '-' })
	return only(known, func(candidate string) bool { return slices.Contains(parts, candidate) })
}

// only returns the only word that is wanted, and "" if none is or several are.
func only(words []string, wanted func(string) bool) (found string) {
	for _, word := range words {
		if !wanted(word) {
			continue
		}
		if found != "" {
			return ""
		}
		found = word
	}
	return found
}

func plainWord(word string) string {
	return strings.NewReplacer("_", "", "-", "").Replace(strings.ToLower(word))
}

// Slips returns the number of letters to add, leave out, replace, or swap with the
// next one in order to make b of a.
func Slips(a, b string) int {
	// The rows of the table for the last two letters of a and for this one; a
	// column for each length of b's beginning.
	before, last, row := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		before, last, row = last, row, before
		row[0] = i + 1
		for j := range len(b) {
			replaced := last[j]
			if a[i] != b[j] {
				replaced++
			}
			row[j+1] = min(last[j+1]+1, row[j]+1, replaced)
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				row[j+1] = min(row[j+1], before[j-1]+1)
			}
		}
	}
	return row[len(b)]
}
