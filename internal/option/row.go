package option

import (
	"fmt"
	"slices"
	"strings"
)

// Row is an option of a block: a line of a Caddyfile, the field that it sets, and its
// documentation.
type Row struct {
	// Name is the word that the line begins with.
	Name string
	// Args are the arguments of the line, as the grammar shows them, such as
	// "<duration> [<queue>]".
	Args string
	// Block are the options of the block that ends the line.
	Block []Row
	// JSON are the fields of JSON that the line sets. Default: the one called Name.
	JSON []string
	// Field is what the line sets.
	Field Field
	// Check returns what is wrong with the field, also if JSON set it. Default: nothing.
	Check func() error
	// Values are what values of fields of JSON must be, beyond their types, in the words of a schema.
	Values map[string]Schema
	// Repeats reports whether the line may be repeated.
	Repeats bool
	// Section is the heading in docs/configuration.md above the table with this row,
	// whose cells are Default and Doc. A row without Doc shares those of the row before.
	Section, Default, Doc string
	// Parts say what fields of JSON mean by themselves, where Doc is about the line. The schema and the
	// comments of the fields have them.
	Parts map[string]string
}

// Field is what a line sets.
type Field struct {
	// Set parses the arguments of the line.
	Set Setter
	// Text returns the arguments of a line that sets what is set, and whether anything
	// is. Default: it is not part of a definition.
	Text func() (args string, given bool)
	// choice is a value that must be one of the words in the row's Args.
	choice func() string
}

// Table has the options of a block.
type Table struct {
	Rows []Row
	// Also are options that are accepted, but not listed.
	Also []Row
	// Elsewhere are the names of options that belong in Place.
	Elsewhere []string
	Place     string
}

// Names returns the names of options.
func Names(rows []Row) (names []string) {
	for _, row := range rows {
		names = append(names, row.Name)
	}
	return names
}

// Check returns what is wrong with the first field that is wrong.
func Check(rows []Row) error {
	// The checks of other rows rely on the words that these choose.
	for _, row := range rows {
		if row.Field.choice != nil {
			if err := OneOf(row.Name, row.Field.choice(), strings.Split(row.Args, "|")...); err != nil {
				return err
			}
		}
	}
	for _, row := range rows {
		if row.Check == nil {
			continue
		}
		if err := row.Check(); err != nil {
			return err
		}
	}
	return nil
}

// Definition returns the lines of all options that differ from their defaults.
func Definition(rows []Row) string {
	var lines []string
	for _, row := range rows {
		if row.Field.Text == nil {
			continue
		}
		if args, given := row.Field.Text(); given && (args != strings.Trim(row.Default, "`") || strings.HasPrefix(row.Default, "required")) {
			lines = append(lines, strings.TrimSpace(row.Name+" "+args))
		}
	}
	return strings.Join(lines, ", ")
}

// Grammar returns the lines of a block as documentation shows them.
func Grammar(rows []Row) (lines []string) {
	for len(rows) > 0 {
		// Arguments are aligned up to the next line with a block.
		end := slices.IndexFunc(rows, func(row Row) bool { return row.Block != nil })
		if end < 0 {
			end = len(rows)
		}
		width := 0
		for _, row := range rows[:end] {
			width = max(width, len(row.Name))
		}
		for _, row := range rows[:end] {
			lines = append(lines, strings.TrimSpace(fmt.Sprintf("%-*s %s", width, row.Name, row.Args)))
		}
		if rows = rows[end:]; len(rows) == 0 {
			break
		}
		lines = append(lines, strings.TrimSpace(rows[0].Name+" "+rows[0].Args)+" {")
		for _, line := range Grammar(rows[0].Block) {
			lines = append(lines, "\t"+line)
		}
		lines, rows = append(lines, "}"), rows[1:]
	}
	return lines
}

// Reference returns the table of a section of the documentation, and "" if it has no
// option.
func Reference(rows []Row, section string) string {
	var names, cells []string
	for _, row := range Flatten(rows) {
		switch name := "`" + row.Name + "`"; {
		case row.Section != section:
		case row.Doc == "" && len(names) > 0:
			names[len(names)-1] += ", " + name
		case !slices.Contains(names, name): // Blocks may share rows.
			names = append(names, name)
			cells = append(cells, strings.TrimRight(fmt.Sprintf(" | %s | %s", row.Doc, row.Default), " ")+" |\n")
		}
	}
	if names == nil {
		return ""
	}
	var b strings.Builder
	b.WriteString("| option | meaning | default |\n|---|---|---|\n")
	for i, name := range names {
		b.WriteString("| " + name + cells[i])
	}
	return b.String()
}

// Flatten returns rows, each followed by those of its block.
func Flatten(rows []Row) (all []Row) {
	for _, row := range rows {
		all = append(append(all, row), Flatten(row.Block)...)
	}
	return all
}

// Table sets the fields of all options of a block.
func (p *Parser) Table(t *Table) error {
	for nesting := p.Nesting(); p.NextBlock(nesting); {
		if err := p.Line(t); err != nil {
			return err
		}
	}
	return nil
}

// Line sets the field of the current option of a block.
func (p *Parser) Line(t *Table) error {
	for _, row := range slices.Concat(t.Rows, t.Also) {
		if row.Name != p.Val() {
			continue
		}
		if row.Repeats {
			p.lines[row.Name] = p.Token()
		} else if err := p.once(); err != nil {
			return err
		}
		if other := p.joined(Names(t.Rows)); other != "" {
			return p.Errf("%s has %s on its line: write one option a line, without semicolons", row.Name, other)
		}
		return row.Field.Set(p)
	}
	name := p.Val()
	switch known := Names(t.Rows); {
	case name == "{":
		return p.Err("the option before { takes no block: remove it")
	case slices.Contains(t.Elsewhere, name):
		return p.Errf("%s belongs in %s", name, t.Place)
	case instead[name] != "":
		return p.Errf("unknown option %s: %s", name, instead[name])
	default:
		return p.Errf("unknown option %s: it must be one of %s%s", name, strings.Join(known, ", "), DidYouMean(name, known))
	}
}
