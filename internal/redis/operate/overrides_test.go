package operate

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/ask"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/store"
)

func FuzzFrames(f *testing.F) {
	for _, reply := range []string{
		"", "LOST", "0 13 1 18000000000007\n= 2 24 k:" + strings.Repeat("\x00", 24) + "\n", "DONE", "0 1 0 7\n", "0 1 0 7\n- 3 0 bob\n", "0 2 0 77\n5 -3 4 x v 77\n", "0 1 -1 7\n", "0 3 0 7\n", "0 1 0 7", "! 3 0 a\nb\n",
		"0 9223372036854775807 9223372036854775807 x\n", "SET 2 1 10{\n", "0 0 0 \n3600000 13 2 block:api:tag{}\n",
	} {
		f.Add(reply)
	}
	f.Fuzz(func(t *testing.T, reply string) {
		frames, err := framesOf(reply)
		if err != nil {
			if !errors.Is(err, wire.ErrReply) {
				t.Errorf("%q is refused by %v", reply, err)
			}
			return
		}
		// What is read is the whole reply.
		n := 0
		for _, part := range frames {
			n += len(part.word) + len(part.texts[0]) + len(part.texts[1]) + len(" 0 0 \n")
		}
		if n > len(reply) {
			t.Errorf("%q has %d bytes in its parts", reply, n)
		}
		for _, r := range []*reading{{}, {unsound: map[string]bool{}}} {
			_, _ = r.take(&Operator{asker: &ask.Asker{}, now: time.Now}, reply)
		}
	})
}

// TestFramesHoldAnyBytes, and one follows the other.
func TestFramesHoldAnyBytes(t *testing.T) {
	want := []frame{{"-", [2]string{"a\n- 1 0 b\n", ""}}, {"SET", [2]string{" ", "\n\xff 3"}}, {"", [2]string{}}}
	var reply string
	for _, part := range want {
		reply += fmt.Sprintf("%s %d %d %s%s\n", part.word, len(part.texts[0]), len(part.texts[1]), part.texts[0], part.texts[1])
	}
	got, err := framesOf(reply)
	if must(t, err); fmt.Sprintf("%q", got) != fmt.Sprintf("%q", want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestDamagedOverridesAreNamed, for the command that ends them, or with what does if none can.
func TestDamagedOverridesAreNamed(t *testing.T) {
	p := &Operator{asker: &ask.Asker{Keys: ask.Keys{Prefix: "rl"}}}
	for name, want := range map[string]string{
		"block:z:r2z:k": `, under the name "block:z:r2z:k"`, "zone:z:": `, under the name "zone:z:"`,
		"junk": `HDEL rl:#overrides2 "junk"`, "": `HDEL rl:#overrides2 ""`, "block:z:": `HDEL rl:#overrides2 "block:z:"`, "a:b:c\nd": `HDEL rl:#overrides2 "a:b:c\nd"`,
	} {
		v := p.newVersion(name, 1, store.NoEnd, store.NoEnd, "x")
		if !errors.Is(v.damaged, store.ErrDamaged) || !strings.Contains(v.damaged.Error(), want) {
			t.Errorf("%q: %v, want %s", name, v.damaged, want)
		}
		// What no command can end is not learned either: who deletes it would find it written back.
		value := string(wire.AppendPacked(nil, 7, store.NoEnd, store.NoEnd)) + "x"
		if v := p.versionIn(name, value, time.Now().UnixMilli(), time.Now()); (v == nil) != strings.Contains(want, "HDEL") {
			t.Errorf("%q is read as %+v", name, v)
		}
	}
}
