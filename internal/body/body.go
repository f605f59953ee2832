// Package body finds numbers in the bodies of responses while they pass.
//
// A [Reader] is given the parts of a body as they are written, decodes and tokenizes them, and
// remembers the last number at each [Path]. What it keeps is bounded, however long the body, its
// events and its strings are.
package body

import (
	"errors"
	"io"
	"net/http"
	"strings"
)

// Why a body was not read to its end.
var (
	// ErrNotJSON: the type of the body is none of JSON, or the body is no JSON.
	ErrNotJSON = errors.New("not JSON")
	// ErrEncoding: the content coding is unknown, or the body does not follow it, or
	// expands too much.
	ErrEncoding = errors.New("content coding")
	// ErrBrokenOff: the body ends before its document, or before its coding does.
	ErrBrokenOff = errors.New("broken off")
)

// Reader finds the last number at each of some paths in a body. Its methods are called by one
// goroutine.
type Reader struct {
	// documents finds the numbers; parts of the body reach it through to.
	documents documents
	to        sink
	err       error
	isStream  bool
}

// sink takes the parts of a body.
type sink interface {
	io.Writer
	// Close ends the body, and returns what is wrong with it.
	Close() error
}

// NewReader returns a reader of the body that follows a header.
func NewReader(h http.Header, paths []Path) *Reader {
	r := &Reader{documents: documents{paths: make([]found, len(paths))}}
	for i, path := range paths {
		r.documents.paths[i].Path = path
	}
	kind := mediaType(h.Get("Content-Type"))
	switch {
	case kind == "text/event-stream":
		r.to, r.isStream = &events{to: &r.documents}, true
	case isLines(kind):
		r.to, r.isStream = &records{to: &r.documents, separator: '\n'}, true
	case kind == "application/json-seq", strings.HasSuffix(kind, "+json-seq"):
		r.to, r.isStream = &records{to: &r.documents, separator: recordSeparator}, true
	case kind == "", kind == "application/json", kind == "text/json", strings.HasSuffix(kind, "+json"):
		r.to = &whole{to: &r.documents}
	default:
		r.err = ErrNotJSON
		return r
	}
	codings := contentCodings(h)
	if len(codings) == 0 {
		return r
	}
	decoder, err := newDecoder(codings, r.to)
	if r.to, r.err = decoder, err; err != nil {
		r.to = nil
	}
	return r
}

// mediaType returns the type that a Content-Type names, without parameters.
func mediaType(contentType string) string {
	kind, _, _ := strings.Cut(contentType, ";")
	return strings.ToLower(strings.TrimSpace(kind))
}

// isLines reports whether each line of a body of that type is a document.
func isLines(kind string) bool {
	switch strings.TrimPrefix(strings.TrimPrefix(kind, "application/"), "x-") {
	case "ndjson", "jsonl", "jsonlines", "json-lines", "stream+json":
		return true
	}
	return false
}

// Reads reports whether the rest of the body is of use.
func (r *Reader) Reads() bool { return r != nil && r.to != nil && r.err == nil }

// IsStream reports whether the body is a sequence of documents, which has no end of its own.
func (r *Reader) IsStream() bool { return r != nil && r.isStream }

// IsWhole reports whether the body was a document that was read to its end, or a stream that said
// that it ends: nothing can be missing, whatever happened to the connection. It is for after Close.
func (r *Reader) IsWhole() bool {
	switch {
	case r == nil || r.to != nil:
		return false
	case r.isStream:
		return r.documents.isDone
	}
	return r.err == nil && r.documents.wasRead
}

// Saw takes the next part of the body.
func (r *Reader) Saw(b []byte) {
	if r.Reads() && len(b) > 0 {
		_, r.err = r.to.Write(b)
	}
}

// Close ends the body. It must be called, because decoders have a goroutine.
func (r *Reader) Close() {
	if r == nil || r.to == nil {
		return
	}
	if err := r.to.Close(); r.err == nil || err != nil {
		r.err = err
	}
	r.to = nil
}

// Err returns why the body was not read to its end, or nil. It is for after Close.
func (r *Reader) Err() error {
	if r == nil {
		return nil
	}
	return r.err
}

// Number returns the text of the last number at a path, and whether there was one. It is for
// after Close.
func (r *Reader) Number(path string) (text string, ok bool) {
	if r == nil || r.to != nil {
		return "", false
	}
	for i := range r.documents.paths {
		if p := &r.documents.paths[i]; p.text == path {
			return string(p.number), len(p.number) > 0
		}
	}
	return "", false
}
