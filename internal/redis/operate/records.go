package operate

import (
	"context"
	"crypto/sha1"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/luascripts"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// A server loads this when records are first asked for.
var scriptRecord = wire.NewScript(luascripts.Record, "")

// Record returns what a shard has under an ID.
func (p *Operator) Record(ctx context.Context, shard *Shard, id string) (store.Record, error) {
	name := p.asker.Keys.Record(id)
	_, found, err := p.runRecord(ctx, shard, true, "get", name)
	return recordOf(found, id), err
}

// PutRecord is [store.Records.PutRecord] on a shard.
func (p *Operator) PutRecord(ctx context.Context, shard *Shard, r store.Record) (store.Record, error) {
	if err := store.CheckRecord(&r); err != nil {
		return store.Record{}, err
	}
	name := r.ID
	if r.Shard == "" {
		name = p.asker.Keys.Record(r.ID)
	}
	// A second run would find the first one's value.
	word, found, err := p.runRecord(ctx, shard, false, "put", name, r.Version, p.asker.Keys.Seal(r.Value), r.Left.Milliseconds(), store.MaxRecords, store.MaxShare)
	switch {
	case err != nil:
		return store.Record{}, err
	case word == "FULL":
		return store.Record{}, fmt.Errorf("shard %s: %w", p.shardName(shard), store.ErrRecordsFull)
	case word == "CHANGED":
		err = store.NotExecuted(store.ErrChanged)
	}
	is := recordOf(found, r.ID)
	is.Shard = r.Shard
	return is, err
}

// recordOf returns the one record that was found, or that there is none.
func recordOf(found []store.Record, id string) store.Record {
	for _, r := range found {
		r.Shard = ""
		if r.ID = id; r.Value != "" || r.Version != "" {
			return r
		}
	}
	return store.Record{ID: id}
}

// DueRecords implements [store.Records]. Where there are no records, that costs no script, and needs no right
// of its own.
func (p *Operator) DueRecords(ctx context.Context, most int) (due []store.Record, err error) {
	var mu sync.Mutex
	err = p.atShards(p.shards(), func(shard *Shard) error {
		first := wire.NewRead("zrange", p.asker.Keys.RecordsDue(), 0, 0)
		if err := p.atKeeper(ctx, shard, first); err != nil {
			return err
		}
		if names, err := first.Texts(); err == nil && len(names) == 0 {
			return nil
		}
		_, found, err := p.runRecord(ctx, shard, true, "due", most, store.RecordPause.Milliseconds())
		mu.Lock()
		defer mu.Unlock()
		due = append(due, found...)
		return err
	})
	return due, err
}

// runRecord runs the script of records at a shard's primary. One whose outcome does not matter may run again.
func (p *Operator) runRecord(ctx context.Context, shard *Shard, again bool, op string, args ...any) (word string, found []store.Record, err error) {
	keys := []any{p.asker.Keys.Records(), p.asker.Keys.RecordsDue()}
	cmd := wire.NewEval(scriptRecord, false, keys, append([]any{op}, args...)...)
	cmd.Reads = again
	if err := p.atKeeper(ctx, shard, cmd); err != nil {
		return "", nil, err
	}
	reply, err := cmd.Result()
	if err != nil {
		return "", nil, err
	}
	return p.recordsIn(reply, p.shardName(shard))
}

// atKeeper runs a command about records at a shard's primary. The error wraps [store.ErrNotExecuted] if it
// certainly did not run.
func (p *Operator) atKeeper(ctx context.Context, shard *Shard, cmd *wire.Command) error {
	ctx, cancel := p.withinTimeout(ctx)
	defer cancel()
	shard.Await(ctx)
	at := shard.Owner(wire.SlotOf([]byte(p.asker.Keys.Records())))
	if at == nil {
		return store.NotExecuted(wire.ErrNoServers)
	}
	deadline, _ := ctx.Deadline()
	c := wire.NewCall(deadline, 0)
	c.Cmds = append(c.Cmds, cmd)
	sent, err := at.Checks.Do(ctx, c)
	if err != nil {
		if !sent {
			err = store.NotExecuted(err)
		}
		return err
	}
	defer c.Release()
	return cmd.Outcome
}

// recordsIn reads a reply of the script. What cannot be read of a value, because it was written under
// another key_secret, has a version alone.
func (p *Operator) recordsIn(reply, shard string) (word string, found []store.Record, err error) {
	word, rest, _ := strings.Cut(reply, " ")
	now, rest, err := cutNumber(rest)
	for err == nil && rest != "" {
		var left, ofName, ofValue int64
		left, rest, err = cutNumber(rest)
		if err == nil {
			ofName, rest, err = cutNumber(rest)
		}
		if err == nil {
			ofValue, rest, err = cutNumber(rest)
		}
		if err != nil || ofName < 0 || ofValue < 0 || ofName+ofValue > int64(len(rest)) {
			return "", nil, fmt.Errorf("%w: %.100q", wire.ErrReply, reply)
		}
		name, stored := rest[:ofName], rest[ofName:ofName+ofValue]
		rest = rest[ofName+ofValue:]
		value, _ := p.asker.Keys.Unseal(stored)
		found = append(found, store.Record{
			ID: name, Shard: shard, Value: value, Version: versionOf(stored),
			Left: time.Duration(left) * time.Millisecond, Now: now * 1000,
		})
	}
	return word, found, err
}

// versionOf returns the digest of a value, which the script knows too.
func versionOf(value string) string {
	sum := sha1.Sum([]byte(value)) //nolint:gosec // no secret: Redis has no other one
	return hex.EncodeToString(sum[:])
}

// cutNumber returns the number at the beginning of a text, and what follows the space behind it.
func cutNumber(text string) (n int64, rest string, err error) {
	number, rest, _ := strings.Cut(text, " ")
	if n, err = strconv.ParseInt(number, 10, 64); err != nil {
		err = fmt.Errorf("%w: %.100q", wire.ErrReply, text)
	}
	return n, rest, err
}
