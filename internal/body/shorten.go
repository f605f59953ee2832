package body

// shortener passes a JSON document on with long strings cut, and white space of any length as
// one space, so that no token is long.
type shortener struct {
	at place
	// length is how much of a string, number, word or byte order mark was passed on.
	length int
	// isCut is set if no more of the string is passed on.
	isCut bool
}

const (
	// maxToken is more than any name in a path has, written with escapes.
	maxToken = 6*maxNameLength + 64
	// escapeLength is the longest that begins with a backslash.
	escapeLength = len(`\u0000`)
	// recordSeparator begins a document of application/json-seq.
	recordSeparator = 0x1e
	// byteOrderMark may begin a document, or a body of events.
	byteOrderMark = "\ufeff"
)

// Where in a document the shortener is.
const (
	atBegin place = iota
	between
	inSpace
	inWord // or in a number
	inString
	inEscape
)

// shorten appends the beginning of b to a buffer until that is full, and returns the rest of
// b.
func (s *shortener) shorten(to, b []byte) (out, rest []byte, err error) {
	for len(b) > 0 && len(to) < cap(to) {
		n := 1
		switch c := b[0]; {
		case s.at == atBegin && s.length < len(byteOrderMark) && c == byteOrderMark[s.length]:
			s.length++
		case s.at == inEscape:
			to, _ = s.pass(to, b[:1])
			s.at = inString
		case s.at == inString && c == '"':
			to = append(to, c)
			s.at = between
		case s.at == inString && c == '\\':
			// An escape is passed on whole, or not at all.
			s.isCut = s.isCut || s.length > maxToken-escapeLength
			to, _ = s.pass(to, b[:1])
			s.at = inEscape
		case s.at == inString:
			for n < len(b) && b[n] != '"' && b[n] != '\\' {
				n++
			}
			to, n = s.pass(to, b[:n])
		case c == '"':
			to = append(to, c)
			s.at, s.length, s.isCut = inString, 0, false
		case kinds[c] == spaceKind:
			if s.at != inSpace {
				to = append(to, ' ')
			}
			s.at = inSpace
		case kinds[c] == punctuationKind:
			to = append(to, c)
			s.at = between
		default:
			if s.at != inWord {
				s.at, s.length, s.isCut = inWord, 0, false
			}
			for n < len(b) && kinds[b[n]] == 0 {
				n++
			}
			if to, n = s.pass(to, b[:n]); s.isCut {
				return to, nil, ErrNotJSON
			}
		}
		b = b[n:]
	}
	return to, b, nil
}

// pass appends what fits of a token to a buffer, and returns how much of the token is done
// with.
func (s *shortener) pass(to, token []byte) (out []byte, n int) {
	if s.isCut {
		return to, len(token)
	}
	n = min(len(token), maxToken-s.length, cap(to)-len(to))
	s.length += n
	if s.isCut = n < len(token) && s.length == maxToken; s.isCut {
		return append(to, token[:n]...), len(token)
	}
	return append(to, token[:n]...), n
}

// kinds are kinds of bytes outside of strings: those of words have none.
var kinds = [256]byte{
	' ': spaceKind, '\t': spaceKind, '\r': spaceKind, '\n': spaceKind, recordSeparator: spaceKind,
	'{': punctuationKind, '}': punctuationKind, '[': punctuationKind, ']': punctuationKind,
	',': punctuationKind, ':': punctuationKind, '"': punctuationKind,
}

const (
	spaceKind       = 1
	punctuationKind = 2
)
