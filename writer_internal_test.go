package shardlimit

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// readerFromWriter notes that it was given a reader, as net/http's writer is
// for sendfile.
type readerFromWriter struct {
	*httptest.ResponseRecorder
	given io.Reader
}

func (w *readerFromWriter) ReadFrom(r io.Reader) (int64, error) {
	w.given = r
	return io.Copy(w.ResponseRecorder, r)
}

func TestReadFromReachesTheServersWriter(t *testing.T) {
	below := &readerFromWriter{ResponseRecorder: httptest.NewRecorder()}
	tr := newTracker(below, nil)
	body := strings.NewReader("body")
	n, err := tr.ReadFrom(body)
	if err != nil || n != 4 {
		t.Fatalf("copied %d bytes, error %v", n, err)
	}
	if below.given != io.Reader(body) {
		t.Errorf("the server's writer was given %T", below.given)
	}
	if !tr.settled {
		t.Error("the request is not settled")
	}
}

func TestInformationalStatusesAreNotFinal(t *testing.T) {
	tr := newTracker(httptest.NewRecorder(), nil)
	tr.WriteHeader(http.StatusEarlyHints)
	if tr.settled {
		t.Error("the request is settled by an informational status")
	}
	tr.WriteHeader(http.StatusSwitchingProtocols)
	if !tr.settled {
		t.Error("the request is not settled by the upgrade")
	}
}
