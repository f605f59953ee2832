package redis

import (
	"bytes"
	"encoding/binary"
	"testing"
)

// FuzzReply decodes any reply: it yields an error or a state that makes sense.
func FuzzReply(f *testing.F) {
	f.Add(replyBytes(1, 2), int64(1))
	f.Add(replyBytes(0, 0), int64(1))
	f.Add(replyBytes(3, 200, 100), int64(100))
	f.Add(replyBytes(-1, 200, 100), int64(100))
	f.Add(replyBytes(1, 100, 200), int64(100))
	f.Add([]byte{}, int64(0))
	f.Fuzz(func(t *testing.T, data []byte, now int64) {
		var reply []int64
		for r := bytes.NewReader(data); ; {
			var n int64
			if binary.Read(r, binary.BigEndian, &n) != nil {
				break
			}
			reply = append(reply, n)
		}
		if b, err := decodeCheck(reply, now); err == nil && b.Reset != 0 {
			if st := b.Check(now, 10, 1); b.Used < 0 || st.Remaining < 0 || st.Remaining > 10 || st.Reset <= now {
				t.Fatalf("check reply %v at %d is taken for %+v", reply, now, st)
			}
		}
		if b, at, err := decodeWrite(reply, now); err == nil {
			if st := b.Charged(at, 10); b.Used < 0 || st.Remaining < 0 || st.Remaining > 10 || st.Reset <= at {
				t.Fatalf("reply %v is taken for %+v", reply, st)
			}
		}
	})
}

func replyBytes(values ...int64) (b []byte) {
	for _, v := range values {
		b = binary.BigEndian.AppendUint64(b, uint64(v)) //nolint:gosec // the bits matter
	}
	return b
}
