package shardlimit

import (
	"encoding/json"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/store"
)

func TestBatchInJSON(t *testing.T) {
	for text, want := range map[string]struct {
		batch Batch
		again string
	}{
		`10`:     {"10", `10`},
		`"10"`:   {"10", `10`},
		`"auto"`: {"auto", `"auto"`},
		`"off"`:  {"off", `"off"`},
		`""`:     {"", `""`},
		`1.5`:    {"1.5", `"1.5"`},
	} {
		var got Batch
		if err := json.Unmarshal([]byte(text), &got); err != nil || got != want.batch {
			t.Errorf("%s is %q, %v, want %q", text, got, err, want.batch)
		}
		if again, err := json.Marshal(got); err != nil || string(again) != want.again {
			t.Errorf("%s becomes %s, %v, want %s", text, again, err, want.again)
		}
	}
	for _, text := range []string{`true`, `null`, `[]`, `{}`} {
		var got Batch
		if err := json.Unmarshal([]byte(text), &got); err == nil {
			t.Errorf("%s is %q, want an error", text, got)
		}
	}
}

func TestBatchOfAZone(t *testing.T) {
	for batch, want := range map[Batch]int64{
		"": 0, "off": 0, "auto": store.BatchAuto, "1": 1, "0010": 10, "9007199254740991": store.MaxInteger,
	} {
		z := &Zone{Name: "test", Key: Texts{"k"}, Events: "10", Batch: batch}
		if c := z.compile(); c.Batch != want || c.BatchShare != defaultBatchShare {
			t.Errorf("batch %q is %d with a share of %d percent, want %d and %d", batch, c.Batch, c.BatchShare, want, defaultBatchShare)
		}
	}
	z := &Zone{Name: "test", Key: Texts{"k"}, Events: "10", Batch: "auto", BatchShare: 25}
	if c := z.compile(); c.BatchShare != 25 {
		t.Errorf("batch_share 25 is %d", c.BatchShare)
	}
}
