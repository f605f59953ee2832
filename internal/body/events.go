package body

import "bytes"

// whole is a body that is a document, or several without anything between.
type whole struct{ to *documents }

func (w *whole) Write(b []byte) (int, error) { return w.to.Write(b) }

// Close implements sink.
func (w *whole) Close() error { return w.to.end() }

// records is a body of documents with a separator after, or before, each.
type records struct {
	to        *documents
	separator byte
}

func (r *records) Write(b []byte) (int, error) {
	for rest := b; len(rest) > 0; {
		record, after, isWhole := bytes.Cut(rest, []byte{r.separator})
		// One that is no document does not spoil the next.
		_, _ = r.to.Write(record)
		if isWhole {
			_ = r.to.end()
		}
		rest = after
	}
	return len(b), nil
}

// Close implements sink.
func (r *records) Close() error { return r.to.endAll() }

// events is a body of server-sent events, whose data are documents.
type events struct {
	to *documents
	at place
	// matched is how many bytes of the line, or of the byte order mark, are as expected.
	matched int
	isLater bool
	// isAfterCR is set if the last byte was a CR, after which a LF ends no other line.
	isAfterCR bool
	// ending is how many bytes of the data of the current event are as in the last one of a
	// stream that says so, or notEnding.
	ending int
}

// lastData is the data of the event that ends a stream, by a convention of APIs of language models,
// which notEnding is longer than.
const (
	lastData  = "[DONE]"
	notEnding = len(lastData) + 1
)

// place is where in a line, or in a document, the reader is.
type place uint8

// Where in a line the reader is.
const (
	inField place = iota
	inData
	inOther
)

const dataField = "data:"

func (e *events) Write(b []byte) (int, error) {
	n := len(b)
	for !e.isLater && len(b) > 0 {
		if e.isLater = e.matched == len(byteOrderMark) || b[0] != byteOrderMark[e.matched]; e.isLater {
			e.matched = 0
		} else {
			e.matched++
			b = b[1:]
		}
	}
	for len(b) > 0 {
		if e.isAfterCR && b[0] == '\n' {
			e.isAfterCR = false
			b = b[1:]
			continue
		}
		e.isAfterCR = false
		b = e.line(b)
	}
	return n, nil
}

// line reads the rest of a line, or its field name, and returns what follows.
func (e *events) line(b []byte) (rest []byte) {
	if e.at == inField && b[0] == dataField[e.matched] {
		if e.matched++; e.matched == len(dataField) {
			e.at = inData
		}
		return b[1:]
	}
	end := bytes.IndexAny(b, "\r\n")
	switch {
	case e.at == inData && end < 0:
		e.data(b)
		return nil
	case end < 0:
		e.at = inOther
		return nil
	case e.at == inData:
		e.data(b[:end])
		// The next line of data goes on behind it.
		_, _ = e.to.Write([]byte{'\n'})
	case end == 0 && e.at == inField && e.matched == 0:
		_ = e.to.end()
		e.ending = 0
	}
	e.at, e.matched, e.isAfterCR = inField, 0, b[end] == '\r'
	return b[end+1:]
}

// data reads a part of a line of data.
func (e *events) data(b []byte) {
	for i := 0; i < len(b) && e.ending < notEnding; i++ {
		switch {
		case b[i] == ' ':
		case e.ending < len(lastData) && b[i] == lastData[e.ending]:
			e.ending++
		default:
			e.ending = notEnding
		}
	}
	if e.ending > 0 {
		e.to.isDone = e.ending == len(lastData)
	}
	_, _ = e.to.Write(b)
}

// Close implements sink.
func (e *events) Close() error { return e.to.endAll() }
