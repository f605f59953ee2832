package main

import (
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
)

// measured is a document that says what was measured.
type measured struct{ name, text string }

func readMeasured(name string) (measured, error) {
	text, err := os.ReadFile(name)
	if err != nil {
		return measured{}, fmt.Errorf("read what was measured: %w", err)
	}
	return measured{name, string(text)}, nil
}

// cells are those of a row of a table.
func cells(row string) []string {
	parts := strings.Split(strings.Trim(strings.TrimSpace(row), "|"), "|")
	for i := range parts {
		parts[i] = strings.TrimSpace(parts[i])
	}
	return parts
}

// figure returns the number in a column of the row that begins with some cells,
// of the table whose head begins with a cell: the only one, or the median of
// several rounds. Of columns of one name the first counts.
func (m measured) figure(table, column string, row ...string) (float64, error) {
	where := fmt.Sprintf("%s, table %q, row %q, column %q", m.name, table, row, column)
	place := -1
	isTable := false
	for text := range strings.Lines(m.text) {
		if !strings.HasPrefix(text, "|") {
			isTable = false
			continue
		}
		all := cells(text)
		if !isTable {
			isTable, place = true, -1
			for i, name := range all {
				if all[0] == table && name == column {
					place = i
					break
				}
			}
			continue
		}
		if place < 0 || len(all) < len(row) || strings.Join(all[:len(row)], "|") != strings.Join(row, "|") {
			continue
		}
		v, err := median(all[place])
		if err != nil {
			return 0, fmt.Errorf("%s: %w", where, err)
		}
		return v, nil
	}
	return 0, fmt.Errorf("%s: there is none", where)
}

// ofRounds is a cell that tells of several rounds: median (min to max).
var ofRounds = regexp.MustCompile(`^(\S+) \(\S+ to \S+\)$`)

// median is that of the rounds that a cell tells of, or its only number.
func median(cell string) (float64, error) {
	if found := ofRounds.FindStringSubmatch(cell); found != nil {
		cell = found[1]
	}
	return strconv.ParseFloat(cell, 64)
}

// stated returns the number in the text that an expression finds.
func (m measured) stated(expression string) (float64, error) {
	found := regexp.MustCompile(expression).FindStringSubmatch(m.text)
	if found == nil {
		return 0, fmt.Errorf("%s does not say %q", m.name, expression)
	}
	v, err := strconv.ParseFloat(found[1], 64)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", m.name, err)
	}
	return v, nil
}
