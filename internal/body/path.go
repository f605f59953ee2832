package body

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/go-json-experiment/json/jsontext"
)

// Path is where a number is in a document: names of members and indexes of elements,
// separated by dots. The element # stands for each element of an array.
type Path struct {
	text     string
	elements []element
}

// element is a step of a path.
type element struct {
	// name is the name of a member, as JSON writes it.
	name []byte
	// index is the index of an element of an array, each, or none.
	index int64
}

const (
	each = -1
	none = -2
)

// String returns the text of the path.
func (p Path) String() string { return p.text }

// What a path has at most: the tokenizer cuts strings, which must stay longer than names.
const (
	maxNameLength = 128
	maxElements   = 32
)

// ParsePath returns the path of a text.
func ParsePath(text string) (Path, error) {
	p := Path{text: text}
	var name strings.Builder
	isLiteral := false
	end := func() error {
		e, err := newElement(name.String(), isLiteral)
		if p.elements = append(p.elements, e); err == nil && len(p.elements) > maxElements {
			err = fmt.Errorf("has more than %d parts", maxElements)
		}
		name.Reset()
		isLiteral = false
		return err
	}
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case c == '\\' && i+1 < len(text):
			i++
			isLiteral = true
			name.WriteByte(text[i])
		case c == '.':
			if err := end(); err != nil {
				return p, err
			}
		case strings.IndexByte(`\*?|@!()=<>%~`, c) >= 0, c == '#' && (name.Len() > 0 || i+1 < len(text) && text[i+1] != '.'):
			return p, fmt.Errorf("has %q, which stands for nothing: a path is made of names and indexes between dots, and # for each element of an array; write \\ before a character that is part of a name", c)
		default:
			name.WriteByte(c)
		}
	}
	return p, end()
}

// newElement returns the element of a name, in which # and digits are meant as they are if
// isLiteral is set.
func newElement(name string, isLiteral bool) (element, error) {
	e := element{index: none}
	switch {
	case name == "":
		return e, fmt.Errorf("has an empty part: write a name or an index before and after each dot")
	case len(name) > maxNameLength:
		return e, fmt.Errorf("has a name of more than %d bytes", maxNameLength)
	case name == "#" && !isLiteral:
		e.index = each
		return e, nil
	}
	quoted, err := jsontext.AppendQuote(nil, name)
	if err != nil {
		return e, fmt.Errorf("has a name that is no UTF-8")
	}
	e.name = quoted
	if index, err := strconv.ParseUint(name, 10, 31); err == nil && !isLiteral && strconv.FormatUint(index, 10) == name {
		e.index = int64(index)
	}
	return e, nil
}

// found is a path, and what was found there.
type found struct {
	Path
	// depth is how many elements lead to the token that was read last.
	depth int
	// number is the text of the last number, which is reused.
	number []byte
}

// leadsTo notes that the reader enters what is named, or is the element of that index, in a
// container at some depth.
func (f *found) leadsTo(depth int, name []byte, index int64) {
	f.depth = min(f.depth, depth)
	if f.depth < depth || len(f.elements) <= depth {
		return
	}
	e := &f.elements[depth]
	if name != nil && string(e.name) == string(name) || name == nil && (e.index == index || e.index == each) {
		f.depth++
	}
}
