package replay

import (
	"encoding/json"
	"strings"
)

// scanner reads one JSON value in place: what it returns are parts of the text. It is several times
// faster than a decoder, and the text of a line is in memory anyway. Texts that are no JSON set bad,
// as far as it reads them.
type scanner struct {
	text string
	at   int
	bad  bool
}

// next returns the first byte of what follows, or 0 at the end.
func (s *scanner) next() byte {
	for s.at < len(s.text) {
		switch c := s.text[s.at]; c {
		case ' ', '\t', '\r', '\n':
			s.at++
		default:
			return c
		}
	}
	return 0
}

// take passes a byte that has to follow, and reports whether it does.
func (s *scanner) take(c byte) bool {
	if s.next() != c {
		s.bad = true
		return false
	}
	s.at++
	return true
}

// object visits the keys of an object. The visit reads the value.
func (s *scanner) object(visit func(key string)) {
	if s.next() != '{' {
		s.skip()
		return
	}
	s.at++
	if s.next() == '}' {
		s.at++
		return
	}
	for !s.bad {
		key := s.str()
		if s.bad || !s.take(':') {
			return
		}
		visit(key)
		if s.next() == '}' {
			s.at++
			return
		}
		s.take(',')
	}
}

// list visits the elements of a list. The visit reads them.
func (s *scanner) list(visit func()) {
	if s.next() != '[' {
		s.skip()
		return
	}
	s.at++
	if s.next() == ']' {
		s.at++
		return
	}
	for !s.bad {
		visit()
		if s.next() == ']' {
			s.at++
			return
		}
		s.take(',')
	}
}

// str reads a string.
func (s *scanner) str() string {
	raw, isPlain := s.quoted()
	if isPlain || s.bad {
		return raw
	}
	var text string
	if json.Unmarshal([]byte(`"`+raw+`"`), &text) != nil {
		s.bad = true
	}
	return text
}

// quoted passes a string, and returns what is between its quotes, and whether that has no escapes.
func (s *scanner) quoted() (raw string, isPlain bool) {
	if !s.take('"') {
		return "", false
	}
	isPlain = true
	for from := s.at; ; {
		n := strings.IndexByte(s.text[s.at:], '"')
		if n < 0 {
			s.bad = true
			return "", false
		}
		part := s.text[s.at : s.at+n]
		s.at += n + 1
		escapes := len(part) - len(strings.TrimRight(part, `\`))
		isPlain = isPlain && strings.IndexByte(part, '\\') < 0
		if escapes%2 == 0 {
			return s.text[from : s.at-1], isPlain
		}
	}
}

// literal reads a number, true, false or null.
func (s *scanner) literal() string {
	s.next()
	from := s.at
	for s.at < len(s.text) && strings.IndexByte(",}] \t\r\n", s.text[s.at]) < 0 {
		s.at++
	}
	s.bad = s.bad || s.at == from
	return s.text[from:s.at]
}

// scalar reads a string or a literal.
func (s *scanner) scalar() (text string, isString bool) {
	switch s.next() {
	case '"':
		return s.str(), true
	case '{', '[':
		s.skip()
		return "", true
	}
	return s.literal(), false
}

// skip passes a value.
func (s *scanner) skip() {
	for depth := 0; !s.bad; {
		switch s.next() {
		case '"':
			s.quoted()
		case '{', '[':
			depth++
			s.at++
			continue
		case '}', ']':
			depth--
			s.at++
		case ',', ':':
			s.at++
			s.bad = s.bad || depth == 0
			continue
		default:
			s.literal()
		}
		if depth <= 0 {
			s.bad = s.bad || depth < 0
			return
		}
	}
}
