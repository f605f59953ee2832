package body

import (
	"errors"
	"io"
	"strconv"

	"github.com/go-json-experiment/json/jsontext"
)

// documents reads JSON documents, one after the other, by a tokenizer that is given the parts
// as they come.
type documents struct {
	paths     []found
	shortener shortener
	tokens    *jsontext.Decoder
	// unread is what the tokenizer has not taken yet, and isEnded set if nothing follows it.
	unread  []byte
	isEnded bool
	// room is where unread begins.
	room []byte
	// err is what is wrong with the current document: the rest of it is ignored.
	err error
	// isBegun is set if the current document has a byte.
	isBegun bool
	// wasRead is set if a document was read to its end, and lastErr what was wrong with
	// the last that was not.
	wasRead bool
	lastErr error
	// isDone is set if the last document was the mark that ends a stream.
	isDone bool
}

// roomSize is how many bytes the tokenizer is given at a time.
const roomSize = 4 << 10

// lenient lets the tokenizer remember no names, and read strings that were cut.
var lenient = []jsontext.Options{jsontext.AllowDuplicateNames(true), jsontext.AllowInvalidUTF8(true)}

// errMore is what the tokenizer gets when it has to wait for the next part. It repeats the
// token then, which is short.
var errMore = errors.New("the rest follows")

// Read gives the tokenizer what is unread.
func (d *documents) Read(p []byte) (int, error) {
	n := copy(p, d.unread)
	d.unread = d.unread[n:]
	switch {
	case n > 0:
		return n, nil
	case d.isEnded:
		return 0, io.EOF
	}
	return 0, errMore
}

// Write reads the next part of the current document.
func (d *documents) Write(b []byte) (int, error) {
	if len(b) > 0 && !d.isBegun {
		d.begin()
	}
	for rest := b; len(rest) > 0 && d.err == nil; {
		var err error
		if d.unread, rest, err = d.shortener.shorten(d.room[:0], rest); len(d.unread) > 0 {
			// Numbers before an error count, whatever parts the document comes in.
			d.read()
		}
		if d.err == nil {
			d.err = err
		}
	}
	return len(b), d.err
}

func (d *documents) begin() {
	if d.tokens == nil {
		d.tokens, d.room = new(jsontext.Decoder), make([]byte, 0, roomSize)
	}
	d.tokens.Reset(d, lenient...)
	d.shortener = shortener{}
	d.isBegun, d.isEnded, d.err = true, false, nil
}

// end ends the current document, and returns what is wrong with it. It may be empty.
func (d *documents) end() error {
	if !d.isBegun {
		return nil
	}
	d.isBegun, d.isEnded = false, true
	if d.err == nil {
		d.read()
	}
	switch {
	case d.err != nil:
		d.lastErr = d.err
	case d.tokens.InputOffset() > 0:
		d.wasRead = true
	}
	return d.err
}

// endAll ends the last document of several. Where any was read, others may be something else,
// such as [DONE], but the last must not be broken off.
func (d *documents) endAll() error {
	if err := d.end(); errors.Is(err, ErrBrokenOff) {
		return err
	}
	if d.wasRead {
		return nil
	}
	return d.lastErr
}

// read takes the tokens that are there.
func (d *documents) read() {
	for d.err == nil {
		err := d.next()
		switch {
		case err == nil:
		case errors.Is(err, errMore), errors.Is(err, io.EOF):
			return
		case errors.Is(err, io.ErrUnexpectedEOF):
			d.err = ErrBrokenOff
		default:
			d.err = ErrNotJSON
		}
	}
}

// next takes a token.
func (d *documents) next() error {
	var text []byte
	var err error
	switch d.tokens.PeekKind() {
	case '"', '0':
		// Of these the bytes are needed.
		text, err = d.tokens.ReadValue()
	case '}', ']':
		_, err = d.tokens.ReadToken()
		return err
	default:
		var token jsontext.Token
		if token, err = d.tokens.ReadToken(); err == nil && (token.Kind() == '{' || token.Kind() == '[') {
			d.locate(d.tokens.StackDepth()-1, nil)
			return nil
		}
	}
	if err == nil {
		if isName := d.locate(d.tokens.StackDepth(), text); !isName && len(text) > 0 {
			d.note(text)
		}
	}
	return err
}

// locate tells the paths where the reader is, once it has read a token with that text in a
// container at some depth, and reports whether the token is the name of a member.
func (d *documents) locate(depth int, text []byte) (isName bool) {
	if depth == 0 {
		return false
	}
	kind, length := d.tokens.StackIndex(depth)
	if kind == '{' && length%2 == 0 {
		return false // the value of a name that was located
	}
	if kind == '[' {
		text = nil
	} else {
		text = canonical(text)
	}
	for i := range d.paths {
		d.paths[i].leadsTo(depth-1, text, length-1)
	}
	return kind == '{'
}

// canonical returns a string as a path writes it.
func canonical(text []byte) []byte {
	for _, c := range text {
		if c == '\\' {
			if name, err := jsontext.AppendUnquote(nil, text); err == nil {
				text, _ = jsontext.AppendQuote(nil, name)
			}
			break
		}
	}
	return text
}

// note remembers a number, which may be in a string, at the paths that lead to it.
func (d *documents) note(text []byte) {
	depth := d.tokens.StackDepth()
	switch {
	case text[0] == '"':
		text = text[1 : len(text)-1]
	case d.isEnded:
		return // more digits may be missing
	}
	for i := range d.paths {
		if p := &d.paths[i]; p.depth == depth && len(p.elements) == depth && IsNumber(string(text)) {
			p.number = append(p.number[:0], text...)
		}
	}
}

// IsNumber reports whether a text is a decimal number, however large, or says that it is
// none.
func IsNumber(text string) bool {
	for i := range len(text) {
		switch text[i] {
		case 'x', 'X', 'p', 'P', '_':
			return false
		}
	}
	_, err := strconv.ParseFloat(text, 64)
	return err == nil || errors.Is(err, strconv.ErrRange)
}
