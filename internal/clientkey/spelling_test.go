package clientkey

import (
	"net/url"
	"runtime"
	"strings"
	"testing"
)

// TestDecoded: escapes of escapes are decoded as well, and what is no escape stays.
func TestDecoded(t *testing.T) {
	for value, want := range map[string]string{
		"": "", "a": "a", "%41": "A", "%2541": "A", "%25%34%31": "A", "%2525252541": "A", "%": "%", "%4": "%4", "100%": "100%",
		"%zz%41": "%zzA", "%%341": "A", "a+b": "a+b", "%2B": "+", "%C3%A9": "é", "%25": "%", "%2525": "%", "%00": "\x00",
	} {
		if got := decoded(value); got != want {
			t.Errorf("%q is decoded to %q, want %q", value, got, want)
		}
	}
}

func FuzzDecoded(f *testing.F) {
	f.Add("%25%34%31")
	f.Fuzz(func(t *testing.T, value string) {
		got := decoded(value)
		if again := decoded(got); again != got {
			t.Errorf("%q is decoded to %q, and that to %q", value, got, again)
		}
		if once, err := url.PathUnescape(value); err == nil && decoded(once) != got {
			t.Errorf("%q is decoded to %q, and what a server reads of it, %q, to %q", value, got, once, decoded(once))
		}
		if escaped := url.PathEscape(value); decoded(escaped) != got {
			t.Errorf("%q is decoded to %q, and escaped to %q", value, got, decoded(escaped))
		}
	})
}

// TestHostileValuesCostLittle: whatever a client sends, the memory that its key takes to make grows with its
// length alone.
func TestHostileValuesCostLittle(t *testing.T) {
	const length = 1 << 16
	for _, part := range []string{"%25", "%", "%2525", "25", "%41", ".", ":", "[", "=", "-", "\xff", "a", " ", "basic ", "::ffff:", "1."} {
		value := "%" + strings.Repeat(part, length/len(part))
		for s := Exact; s <= Escaped; s++ {
			for _, value := range []string{value, value[1:], "basic " + value, "a" + value} {
				var before, after runtime.MemStats
				runtime.ReadMemStats(&before)
				Append(nil, value, s, Networks{})
				runtime.ReadMemStats(&after)
				if took := after.TotalAlloc - before.TotalAlloc; took > 32*length {
					t.Errorf("spelling %d of %d bytes like %.20q took %d bytes", s, len(value), value, took)
				}
			}
		}
	}
}
