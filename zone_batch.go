package shardlimit

import (
	"encoding/json"
	"fmt"
	"strconv"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// Batch is how many events are taken from the store at once: `off`, `auto` or
// a whole number. In JSON it is a string or a number.
type Batch string

// defaultBatchShare is how many percent of events batches hold at most.
const defaultBatchShare = 10

// parse returns how many events a batch has, 0 if there is none, or
// [store.BatchAuto].
func (b Batch) parse() (int64, error) {
	switch b {
	case "", "off":
		return 0, nil
	case "auto":
		return store.BatchAuto, nil
	}
	n, err := strconv.ParseInt(string(b), 10, 64)
	if err != nil || n < 1 || n > store.MaxInteger {
		return 0, badOption("batch", "%q: it must be off, auto or a whole number from 1 to 2^53-1", string(b))
	}
	return n, nil
}

// UnmarshalJSON implements [json.Unmarshaler].
func (b *Batch) UnmarshalJSON(text []byte) error {
	if err := (*Amount)(b).UnmarshalJSON(text); err != nil {
		return fmt.Errorf("%s: it must be off, auto or a whole number", text)
	}
	return nil
}

// MarshalJSON implements [json.Marshaler].
func (b Batch) MarshalJSON() ([]byte, error) { return Amount(b).MarshalJSON() }

func (z *Zone) validateBatch() error {
	batch, err := z.Batch.parse()
	if err != nil {
		return err
	}
	if batch != 0 {
		if err := z.validateBatchOf(batch); err != nil {
			return err
		}
	}
	switch {
	case z.BatchShare < 0 || z.BatchShare > 100:
		return badOption("batch_share", "%d: it must be from 1 to 100 percent", z.BatchShare)
	case z.BatchShare > 0 && batch != store.BatchAuto:
		return badOption("batch_share", "needs batch auto: write it, or remove batch_share")
	}
	return nil
}

// validateBatchOf tells why the zone cannot have a batch of so many events.
func (z *Zone) validateBatchOf(batch int64) error {
	switch a := z.algorithm(); a {
	case store.FixedWindow, store.SlidingWindow:
	case store.GCRA:
		return badOption("batch", "does not go with gcra, for it would defeat its smoothness: remove it, or use fixed_window or sliding_window")
	default:
		return badOption("batch", "does not go with %s, which keeps events one by one: remove it, or use fixed_window or sliding_window", a)
	}
	switch events, err := z.Events.number(); {
	case z.Charge != chargeBefore:
		return badOption("batch", "needs charge before: write it, or remove batch")
	case len(z.Reserves) > 0:
		return badOption("batch", "does not go with reserve, for what is reserved could not be kept apart: remove one")
	case err == nil && batch > events:
		return badOption("batch", "%d: it must be at most events, which is %d", batch, events)
	}
	return nil
}

// Interface guards.
var (
	_ json.Unmarshaler = (*Batch)(nil)
	_ json.Marshaler   = Batch("")
)
