package limiter

import (
	"strconv"
	"strings"
	"unicode/utf8"
)

// queryValues returns the values of a query parameter for which any server may take them: Go drops pairs
// with a semicolon or a bad escape, and everything where there are thousands. Some drop what follows a #,
// others do not.
func queryValues(query, name string) (values []string) {
	if before, _, isCut := strings.Cut(query, "#"); isCut {
		query += "&" + before
	}
	for pair := range strings.FieldsFuncSeq(query, func(r rune) bool { return r == '&' || r == ';' }) {
		key, value, _ := strings.Cut(pair, "=")
		if isNamed(unescaped(key), name) {
			values = append(values, unescaped(value))
		}
	}
	return values
}

// unescaped returns a text without its escapes, also those of ASP (%u0061). What is no escape stays, as
// servers other than Go's have it.
func unescaped(s string) string {
	if !strings.ContainsAny(s, "%+") {
		return s
	}
	b := make([]byte, 0, len(s))
	for i := 0; i < len(s); i++ {
		switch {
		case s[i] == '+':
			b = append(b, ' ')
			continue
		case s[i] == '%' && i+2 < len(s):
			if c, err := strconv.ParseUint(s[i+1:i+3], 16, 8); err == nil {
				b = append(b, byte(c))
				i += 2
				continue
			}
			if c, isCut := strings.CutPrefix(s[i+1:], "u"); isCut && len(c) >= 4 {
				if c, err := strconv.ParseUint(c[:4], 16, 16); err == nil {
					b = utf8.AppendRune(b, rune(c))
					i += 5
					continue
				}
			}
		}
		b = append(b, s[i])
	}
	return string(b)
}

// isNamed reports whether any server may take a key for the name of a parameter or cookie. PHP makes
// underscores of some characters, drops space before the key, and ends it at a NUL. PHP, Rails and Express
// take a key with brackets for a list, ASP.NET one in any case.
func isNamed(key, name string) bool {
	key, _, _ = strings.Cut(strings.TrimLeft(key, " \t\n\v\f\r"), "\x00")
	if len(key) < len(name) || len(key) > len(name) && key[len(name)] != '[' {
		return false
	}
	for i := range len(name) {
		if key[i] != name[i] && folded(key[i]) != folded(name[i]) {
			return false
		}
	}
	return true
}

func folded(c byte) byte {
	switch {
	case c == '.', c == ' ', c == '[':
		return '_'
	case 'A' <= c && c <= 'Z':
		return c + 'a' - 'A'
	}
	return c
}

// cookieValues returns the values of a cookie for which any server may take them. Go drops cookies with
// characters that RFC 6265 does not allow; others do not. Python's SimpleCookie begins and ends one at a
// space as well. Old PHP unescapes names.
func cookieValues(fields []string, name string) (values []string) {
	for _, field := range fields {
		for part := range strings.SplitSeq(field, ";") {
			for at, isFirst := strings.IndexByte(part, '='), true; at >= 0; isFirst = false {
				if key := part[:at]; isFirst && isNamed(unescaped(strings.Trim(key, " \t")), name) || endsInWord(key, name) {
					values = appendReadings(values, strings.Trim(part[at+1:], " \t"))
				}
				next := strings.IndexByte(part[at+1:], '=')
				if next < 0 {
					break
				}
				at += 1 + next
			}
		}
	}
	return values
}

// endsInWord reports whether the last word of a text, not its only one, is the name.
func endsInWord(text, name string) bool {
	text = strings.TrimRight(text, " \t")
	at := len(text) - len(name)
	return at > 0 && (text[at-1] == ' ' || text[at-1] == '\t') && isNamed(text[at:], name)
}

// appendReadings appends a cookie's value without its quotes, and the part before a space, if there is more.
func appendReadings(values []string, text string) []string {
	if text == "" || text[0] != '"' {
		if at := strings.IndexAny(text, " \t"); at >= 0 {
			values = append(values, text[:at])
		}
		return append(values, text)
	}
	for i := 1; i < len(text)-1; i++ {
		if text[i] == '\\' {
			i++
		} else if text[i] == '"' {
			values = append(values, unquoted(text[1:i]))
			break
		}
	}
	// Express drops the first and the last character if the first is a quote.
	return append(values, unquoted(text[1:max(len(text)-1, 1)]))
}

// unquoted returns a text with the characters that its escapes stand for: a backslash before three octal
// digits, or before the character itself.
func unquoted(text string) string {
	if !strings.Contains(text, `\`) {
		return text
	}
	b := make([]byte, 0, len(text))
	for i := 0; i < len(text); i++ {
		switch {
		case text[i] != '\\' || i+1 == len(text):
			b = append(b, text[i])
		case i+3 < len(text) && '0' <= text[i+1] && text[i+1] <= '3' && isOctal(text[i+2]) && isOctal(text[i+3]):
			b = append(b, (text[i+1]-'0')<<6|(text[i+2]-'0')<<3|(text[i+3]-'0'))
			i += 3
		default:
			i++
			b = append(b, text[i])
		}
	}
	return string(b)
}

func isOctal(c byte) bool { return '0' <= c && c <= '7' }
