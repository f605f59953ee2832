package limiter

import (
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/shardlimit/caddy-shardlimit/internal/clientkey"
)

// queryValues returns the values of a query parameter for which any server may take them: Go drops pairs
// with a semicolon or a bad escape, and everything where there are thousands. Some drop what follows a #,
// others do not. One element of a list is a value if nothing else is.
func queryValues(query, name string) (values []string) {
	if before, _, isCut := strings.Cut(query, "#"); isCut {
		query += "&" + before
	}
	var elements []string
	for pair := range strings.FieldsFuncSeq(query, func(r rune) bool { return r == '&' || r == ';' }) {
		key, value, _ := strings.Cut(pair, "=")
		switch isName, isElement := isNamed(unescaped(key), name); {
		case isName:
			values = append(values, unescaped(value))
		case isElement:
			elements = append(elements, unescaped(value))
		}
	}
	if values == nil && len(elements) == 1 {
		return elements
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

// isNamed reports whether any server may take a key for the name of a parameter or cookie, or for that of an
// element of it. PHP makes underscores of some characters, drops space before the key, and ends it at a NUL. PHP,
// Rails and Express take a key with brackets for an element of a list, ASP.NET a name in any case.
func isNamed(key, name string) (isName, isElement bool) {
	key, _, _ = strings.Cut(strings.TrimLeft(key, " \t\n\v\f\r"), "\x00")
	if len(key) < len(name) {
		return false, false
	}
	for i := range len(name) {
		if key[i] != name[i] && folded(key[i]) != folded(name[i]) {
			return false, false
		}
	}
	return len(key) == len(name), len(key) > len(name) && key[len(name)] == '['
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

// mostReadings is how many values of a cookie are read: more are more clients than a request may be of.
const mostReadings = 16

// cookieValues returns the values of a cookie for which any server may take them, each once, and at most one more than
// mostReadings. Go drops cookies with characters that RFC 6265 does not allow; others do not. Old PHP unescapes names.
func cookieValues(fields []string, name string) (values []string) {
	for _, field := range fields {
		for part := range strings.SplitSeq(field, ";") {
			part = clientkey.Trimmed(part)
			if key, value, is := strings.Cut(part, "="); is {
				if isName, _ := isNamed(unescaped(clientkey.Trimmed(key)), name); isName {
					values = appendReading(values, clientkey.Trimmed(value))
				}
			}
			if strings.ContainsAny(part, " \t") {
				values = appendWords(values, part, name)
			}
		}
	}
	return values
}

// appendReading appends a cookie's value without its quotes. Express drops the first and the last character
// if the first is a quote.
func appendReading(values []string, text string) []string {
	if text != "" && text[0] == '"' {
		text = unquoted(text[1:max(len(text)-1, 1)])
	}
	if len(values) > mostReadings || slices.Contains(values, text) {
		return values
	}
	return append(values, text)
}

// appendWords appends the values of a cookie in a part of the header in which Python's SimpleCookie ends cookies at
// space as well. It reads nothing if one of them is none.
func appendWords(values []string, part, name string) []string {
	read := values
	for part != "" {
		key := part
		if end := strings.IndexAny(part, " \t="); end >= 0 {
			key = part[:end]
		}
		rest := strings.TrimLeft(part[len(key):], " \t")
		if rest == "" || rest[0] != '=' {
			if !strings.EqualFold(key, "httponly") && !strings.EqualFold(key, "secure") {
				return values
			}
			part = rest
			continue
		}
		rest = strings.TrimLeft(rest[1:], " \t")
		end := endOfWord(rest)
		if end < len(rest) && rest[end] != ' ' && rest[end] != '\t' {
			return values
		}
		if key == name {
			read = appendReading(read, rest[:end])
		}
		part = strings.TrimLeft(rest[end:], " \t")
	}
	return read
}

// endOfWord returns where the value ends that a text begins with: after its quotes, or before space.
func endOfWord(text string) int {
	if text == "" || text[0] != '"' {
		if end := strings.IndexAny(text, " \t"); end >= 0 {
			return end
		}
		return len(text)
	}
	for i := 1; i < len(text); i++ {
		switch text[i] {
		case '\\':
			i++
		case '"':
			return i + 1
		}
	}
	return 0
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
