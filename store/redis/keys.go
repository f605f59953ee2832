package redis

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"math"
	"strconv"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/shardlimit/caddy-shardlimit/store"
)

const (
	// layoutVersion is part of every key, so that programs which disagree
	// about a bucket's content do not meet.
	layoutVersion = "2"
	// digestBytes is the length of the SHA-256 prefix that replaces a client key.
	// 192 bits keep even an attacker from finding two client keys that share a
	// bucket.
	digestBytes = 24
	// Client keys that start with one of these bytes are never stored as they are.
	digestMark = '#'
	secretMark = '$'
)

// bucketKeys builds the Redis keys of buckets. No other code knows their form:
//
//	<prefix>:<layout version>:<zone>:<algorithm and window>:<client key>
//
// In a Redis Cluster the client key is in braces, as the hash tag: all buckets of
// a client are in one slot.
type bucketKeys struct {
	prefix string
	secret []byte
	// tagged is set for a Redis Cluster.
	tagged bool
}

// key returns the key of a bucket. Two buckets never share a key.
func (k bucketKeys) key(limit *store.Limit, clientKey string) string {
	var scratch [160]byte
	b := append(scratch[:0], k.prefix...)
	b = append(b, ":"+layoutVersion+":"...)
	b = append(b, limit.Zone...)
	b = append(b, ':')
	b = appendRule(b, limit)
	b = append(b, ':')
	if k.tagged {
		b = append(b, '{')
	}
	b = k.appendClient(b, clientKey)
	if k.tagged {
		b = append(b, '}')
	}
	return string(b)
}

// markOf returns the key of the mark that keeps a bucket from migrating. It is in
// the bucket's slot, with any software that honours hash tags, and never the key
// of a bucket, because no prefix contains a #.
func (k bucketKeys) markOf(bucket string) string {
	if k.tagged {
		return k.prefix + ":#" + bucket
	}
	return k.prefix + ":#{" + bucket + "}"
}

func (k bucketKeys) slot(clientKey string) uint16 {
	var scratch [store.MaxClientKey]byte
	return slotOf(k.appendClient(scratch[:0], clientKey))
}

// appendClient appends the form in which a client key is stored.
func (k bucketKeys) appendClient(b []byte, clientKey string) []byte {
	switch {
	case len(k.secret) > 0:
		mac := hmac.New(sha256.New, k.secret)
		mac.Write([]byte(clientKey))
		return appendDigest(b, secretMark, mac.Sum(nil))
	case isPlain(clientKey):
		return append(b, clientKey...)
	default:
		sum := sha256.Sum256([]byte(clientKey))
		return appendDigest(b, digestMark, sum[:])
	}
}

// appendRule appends the algorithm, and the window in the largest unit that holds
// it exactly.
func appendRule(b []byte, limit *store.Limit) []byte {
	b = append(b, layoutOf(limit.Algorithm).code...)
	if limit.Calendar.Unit != "" {
		return appendCalendar(b, limit.Calendar)
	}
	if limit.Align {
		b = append(b, 'a')
	}
	switch w := limit.Window; {
	case w%time.Second == 0:
		return append(strconv.AppendInt(b, int64(w/time.Second), 10), 's')
	case w%time.Millisecond == 0:
		return append(strconv.AppendInt(b, w.Milliseconds(), 10), "ms"...)
	default:
		return append(strconv.AppendInt(b, w.Microseconds(), 10), "us"...)
	}
}

// appendCalendar appends the unit of a calendar, with an s if weeks begin on Sunday,
// and the time zone.
func appendCalendar(b []byte, c store.Calendar) []byte {
	b = append(b, c.Unit...)
	if c.SundayFirst {
		b = append(b, 's')
	}
	if c.TimeZone != "" {
		b = append(append(b, '@'), c.TimeZone...)
	}
	return b
}

func appendDigest(b []byte, mark byte, sum []byte) []byte {
	return base64.RawURLEncoding.AppendEncode(append(b, mark), sum[:digestBytes])
}

// isPlain reports whether a client key can be stored as it is: printable, without
// spaces, without the braces of a hash tag, and unlike a digest.
func isPlain(key string) bool {
	if len(key) == 0 || key[0] == digestMark || key[0] == secretMark {
		return false
	}
	for i := range len(key) {
		if c := key[i]; c <= ' ' || c >= 0x7f || c == '{' || c == '}' {
			return false
		}
	}
	return true
}

const slotCount = 1 << 14

// slotOf returns the slot of a hash tag: its CRC-16 (XMODEM).
func slotOf(tag []byte) uint16 {
	var crc uint16
	for _, b := range tag {
		crc = crc<<8 ^ crcTable[byte(crc>>8)^b]
	}
	return crc % slotCount
}

// crcTable holds the effect of each byte on the CRC.
var crcTable = func() (table [256]uint16) {
	const polynomial = 0x1021
	for i := range table {
		crc := uint16(i) << 8
		for range 8 {
			if carry := crc&0x8000 != 0; carry {
				crc = crc<<1 ^ polynomial
			} else {
				crc <<= 1
			}
		}
		table[i] = crc
	}
	return table
}()

// rendezvous chooses a member for a client key by weighted rendezvous hashing:
// every member gets a score for the key, and the highest wins. A new member takes
// over only the keys that it wins.
type rendezvous struct {
	seeds   []uint64
	weights []float64
	equal   bool
}

// newRendezvous depends on the members' names and weights, not on their order.
func newRendezvous(members []Member) *rendezvous {
	r := &rendezvous{equal: true}
	for _, m := range members {
		r.seeds = append(r.seeds, xxhash.Sum64String(m.Name))
		r.weights = append(r.weights, float64(max(m.Weight, 1)))
		r.equal = r.equal && r.weights[len(r.weights)-1] == r.weights[0]
	}
	return r
}

// owner returns the place of the member that owns key.
func (r *rendezvous) owner(key string) int {
	if len(r.seeds) == 1 {
		return 0
	}
	hash := xxhash.Sum64String(key)
	best, bestScore := 0, math.Inf(-1)
	for i, seed := range r.seeds {
		// A float64 holds 53 bits exactly.
		u := float64(mix(hash^seed)>>11) + 0.5
		score := u
		if !r.equal {
			score = -r.weights[i] / math.Log(u/(1<<53))
		}
		if score > bestScore {
			best, bestScore = i, score
		}
	}
	return best
}

// mix is the finalizer of SplitMix64: every bit of x changes half of the
// result's bits.
func mix(x uint64) uint64 {
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}
