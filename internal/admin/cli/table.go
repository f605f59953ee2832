package cli

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
)

// table writes aligned columns.
type table struct{ w *tabwriter.Writer }

func newTable(out io.Writer, header ...string) *table {
	t := &table{tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)}
	t.row(header...)
	return t
}

func (t *table) row(cells ...string) {
	for i := range cells {
		cells[i] = shown(cells[i])
	}
	fmt.Fprintln(t.w, strings.TrimRight(strings.Join(cells, "\t"), "\t"))
}

func (t *table) end() { _ = t.w.Flush() }

// shown makes a text safe for a terminal and a table: clients choose their keys.
func shown(text string) string {
	quoted := strconv.Quote(text)
	if quoted = quoted[1 : len(quoted)-1]; strings.ContainsFunc(text, func(r rune) bool { return !strconv.IsPrint(r) }) {
		return quoted
	}
	return text
}

func number(n int64) string { return strconv.FormatInt(n, 10) }

// seconds formats a duration in a few digits; 0 is "".
func seconds(s float64) string {
	d := time.Duration(s * float64(time.Second))
	switch {
	case d <= 0:
		return ""
	case d < time.Millisecond:
		return d.Round(time.Microsecond).String()
	case d < time.Second:
		return d.Round(100 * time.Microsecond).String()
	case d < time.Minute:
		return d.Round(100 * time.Millisecond).String()
	default:
		return d.Round(time.Second).String()
	}
}

// until formats the time left until an instant, in seconds since the epoch; "-" if
// there is none.
func until(instant float64, now time.Time) string {
	if instant == 0 {
		return "-"
	}
	left := instant - float64(now.UnixMicro())/1e6
	if left <= 0 {
		return "now"
	}
	return "in " + seconds(left)
}
