package operate

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
)

// info is the reply to INFO.
type info map[string]string

func (i info) field(name string) string { return i[name] }

func parseInfo(text string) info {
	fields := info{}
	for line := range strings.Lines(text) {
		if name, value, ok := strings.Cut(strings.TrimRight(line, "\r\n"), ":"); ok {
			fields[name] = value
		}
	}
	return fields
}

// infoOf asks the server of a lane for INFO.
func infoOf(ctx context.Context, l *wire.Lane) (info, error) {
	text, err := l.Info(ctx, infoTimeout)
	if err != nil {
		return nil, fmt.Errorf("ask %s for INFO: %w", l.Addr, err)
	}
	return parseInfo(text), nil
}

func (i info) isReplica() bool { return i["role"] == "slave" }

// isDetached reports whether a replica does not follow its primary now.
func (i info) isDetached() bool { return i["master_link_status"] == "down" }

// history is the replication history that a server has: by their IDs the offsets from which on it has
// no more of them, as a server that was promoted has of its primary's.
type history map[string]int64

func (i info) history() history {
	h := history{i["master_replid"]: math.MaxInt64}
	if end, err := strconv.ParseInt(i["second_repl_offset"], 10, 64); err == nil {
		h[i["master_replid2"]] = end
	}
	delete(h, "")
	delete(h, noHistory)
	return h
}

// noHistory is the ID of a history that does not exist.
const noHistory = "0000000000000000000000000000000000000000"

// shares reports whether two servers have had a history in common.
func (h history) shares(other history) bool { return h.has(0, other) }

// has reports whether what another server has, up to an offset, is of this history, so that their
// offsets are comparable.
func (h history) has(offset int64, of history) bool {
	for id, end := range of {
		if own, ok := h[id]; ok && offset < min(own, end) {
			return true
		}
	}
	return false
}

// offset is the server's position in its primary's history; -1 if unknown.
func (i info) offset() int64 {
	name := "master_repl_offset"
	if i.isReplica() {
		name = "slave_repl_offset"
	}
	n, err := strconv.ParseInt(i[name], 10, 64)
	if err != nil {
		return -1
	}
	return n
}

// The products that INFO tells apart.
const (
	redis  = "Redis"
	valkey = "Valkey"
)

// mode is what kind of server it is: standalone, cluster or sentinel. Valkey 9 has a word of its own.
func (i info) mode() string { return cmp.Or(i["redis_mode"], i["server_mode"]) }

// product returns what the server is.
func (i info) product() string {
	if i["valkey_version"] != "" {
		return valkey
	}
	return redis
}

// version is the first two numbers of a version.
type version [2]int

func (v version) String() string { return fmt.Sprintf("%d.%d", v[0], v[1]) }

// is compares the version in a text with v; it is 0 if the text has none.
func (v version) is(text string) int {
	var has version
	if n, _ := fmt.Sscanf(text, "%d.%d", &has[0], &has[1]); n < 2 {
		return 0
	}
	return slices.Compare(has[:], v[:])
}

func (i info) isTooOld() bool { return oldest.is(i["redis_version"]) < 0 }

// isTested reports whether the tests run with this version, or with an older and a newer one.
func (i info) isTested() bool { return newestTested[i.product()].is(i.number()) <= 0 }

// number is the server's version, as the product counts.
func (i info) number() string { return cmp.Or(i["valkey_version"], i["redis_version"]) }

// version names the server's version, and the server if it is Valkey.
func (i info) version() string {
	if i.product() == redis {
		return i.number()
	}
	return i.product() + " " + i.number()
}

// skew is the lead of the server's clock over this machine's at an instant.
func (i info) skew(at time.Time) (skew time.Duration, ok bool) {
	micros, err := strconv.ParseInt(i["server_time_usec"], 10, 64)
	if err != nil {
		return 0, false
	}
	return time.UnixMicro(micros).Sub(at), true
}
