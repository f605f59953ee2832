package service

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"testing"

	"connectrpc.com/connect"
	commonv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/shardlimit/caddy-shardlimit/internal/sweep"
)

// compressed returns a body as gzip.
func compressed(t *testing.T, body []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	if _, err := w.Write(body); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// framed returns a message as gRPC sends it.
func framed(flags byte, message []byte) []byte {
	return append(binary.BigEndian.AppendUint32([]byte{flags}, uint32(len(message))), message...)
}

// grpcCodes are those of gRPC that calls get.
var grpcCodes = map[string]string{"0": "ok", "3": connect.CodeInvalidArgument.String(), "8": connect.CodeResourceExhausted.String()}

// codeOf returns the code of an answer, by the protocol of the request.
func codeOf(t *testing.T, w *httptest.ResponseRecorder, isGRPC bool) string {
	t.Helper()
	if isGRPC {
		result := w.Result()
		status := result.Trailer.Get("Grpc-Status")
		if status == "" {
			status = result.Header.Get("Grpc-Status")
		}
		if code, is := grpcCodes[status]; is {
			return code
		}
		return "gRPC status " + status
	}
	if w.Code == http.StatusOK {
		return "ok"
	}
	var failure struct{ Code string }
	if err := json.Unmarshal(w.Body.Bytes(), &failure); err != nil {
		t.Errorf("status %d: %.100q", w.Code, w.Body)
	}
	return failure.Code
}

// TestHostileCalls: whatever a call has, in each protocol it gets an answer or an error of the protocol. Many
// at the same time take a few MB each at most, and nothing of them stays.
func TestHostileCalls(t *testing.T) {
	s := provisioned(t, `{
		"domains": [{"name": "a", "descriptors": [{"key": "k", "zone": "z"}]}],
		"zones": [{"name": "z", "events": 5, "window": "1m"}]}`)
	entry := func(key, value string) *commonv3.RateLimitDescriptor_Entry {
		return &commonv3.RateLimitDescriptor_Entry{Key: key, Value: value}
	}
	many := func(n int, entries ...*commonv3.RateLimitDescriptor_Entry) *ratelimitv3.RateLimitRequest {
		r := &ratelimitv3.RateLimitRequest{Domain: "a"}
		for range n {
			r.Descriptors = append(r.Descriptors, &commonv3.RateLimitDescriptor{Entries: entries})
		}
		return r
	}
	megabyte := strings.Repeat("k", 1<<20)
	unknown := many(1, entry("k", "v"))
	unknown.Domain = "another"
	empty := make([]*commonv3.RateLimitDescriptor_Entry, 6000)
	for i := range empty {
		empty[i] = entry("k", "")
	}
	const invalid, exhausted = "invalid_argument", "resource_exhausted"
	type body struct{ json, proto []byte }
	of := func(r *ratelimitv3.RateLimitRequest) (b body) {
		t.Helper()
		var err error
		if b.proto, err = proto.Marshal(r); err != nil {
			t.Fatal(err)
		}
		if b.json, err = protojson.Marshal(r); err != nil {
			t.Fatal(err)
		}
		return b
	}
	for name, x := range map[string]struct {
		body body
		code string
	}{
		"10,000 descriptors": {of(many(10_000, entry("k", "v"))), exhausted},
		"a megabyte of key":  {of(many(1, entry(megabyte, "v"))), exhausted},
		"unknown domain":     {of(unknown), invalid},
		// As much as fits into a message.
		"descriptors without entries": {body{[]byte(`{"domain":"a","descriptors":[{}` + strings.Repeat(",{}", 20_000) + `]}`), append([]byte{0x0a, 1, 'a'}, bytes.Repeat([]byte{0x12, 0}, 30_000)...)}, invalid},
		"thousands of entries":        {body{[]byte(`{"domain":"a","descriptors":[{"entries":[{"key":"k"}` + strings.Repeat(`,{"key":"k"}`, 5000) + `]}]}`), of(many(1, empty...)).proto}, "ok"},
		"wrong types":                 {body{[]byte(`{"domain":["a"],"descriptors":{"entries":5}}`), []byte{0x08, 1, 0x12, 0xff}}, invalid},
		"nested without end":          {body{[]byte(`{"x":` + strings.Repeat("[", 60_000)), bytes.Repeat([]byte{0x9b, 0x06}, 30_000)}, invalid},
		"nothing":                     {body{[]byte("{}"), nil}, invalid},
	} {
		var calls []func()
		for protocol, r := range map[string]struct {
			contentType, encoding string
			body                  []byte
		}{
			"JSON": {"application/json", "", x.body.json}, "JSON, compressed": {"application/json", "gzip", compressed(t, x.body.json)},
			"gRPC": {"application/grpc", "", framed(0, x.body.proto)}, "gRPC, compressed": {"application/grpc", "gzip", framed(1, compressed(t, x.body.proto))},
			"gRPC-Web": {"application/grpc-web+proto", "", framed(0, x.body.proto)},
		} {
			isGRPC := r.contentType == "application/grpc"
			call := func() *httptest.ResponseRecorder {
				asked := httptest.NewRequest(http.MethodPost, procedure, bytes.NewReader(r.body))
				asked.ProtoMajor = 2
				asked.Header.Set("Content-Type", r.contentType)
				if r.encoding != "" {
					asked.Header.Set(map[bool]string{true: "Grpc-Encoding", false: "Content-Encoding"}[isGRPC], r.encoding)
				}
				return serve(t, s, asked)
			}
			if protocol != "gRPC-Web" { // its trailers are in the body
				if code := codeOf(t, call(), isGRPC); code != x.code {
					t.Errorf("%s by %s: %s, want %s", name, protocol, code, x.code)
				}
			}
			calls = append(calls, func() { call() })
		}
		requireLittleMemory(t, name, calls)
	}
}

// requireLittleMemory makes many of the calls at once.
func requireLittleMemory(t *testing.T, what string, calls []func()) {
	t.Helper()
	const each, stays = 8 << 20, 5 << 10 // bytes a call
	times := sweep.Size(20, 200)
	heap := func() (m runtime.MemStats) {
		// Pools give up their memory at the second collection.
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m
	}
	before := heap()
	var all sync.WaitGroup
	for i := range times {
		all.Go(calls[i%len(calls)])
	}
	all.Wait()
	after := heap()
	if used := (after.TotalAlloc - before.TotalAlloc) / uint64(times); used > each {
		t.Errorf("%s: a call allocates %d bytes, more than %d", what, used, each)
	}
	if kept := int64(after.HeapAlloc) - int64(before.HeapAlloc); kept > int64(stays*times) {
		t.Errorf("%s: %d bytes stay of %d calls, more than %d of each", what, kept, times, stays)
	}
}
