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
	layoutVersion = "1"
	// plainKeyLimit is how long a client key may be to be stored as it is.
	plainKeyLimit = 64
	// digestBytes of SHA-256 stand for a client key. 192 bits keep even an
	// attacker from finding two client keys that share a bucket.
	digestBytes = 24
	// Client keys with these first bytes are never stored as they are.
	digestMark = '#'
	secretMark = '$'
)

// bucketKeys builds the Redis keys of buckets. It is the one place that knows
// their form:
//
//	<prefix>:<layout version>:<zone>:<algorithm and window>:<client key>
//
// In a Redis Cluster the client key is put into braces: by what is in them the
// cluster chooses the node, so that the buckets of a client are on one.
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

// markOf returns the key that keeps a bucket from being brought from its former
// owner. It is in the bucket's slot, whoever spreads keys by their hash tags, and
// is no key of a bucket, for no prefix has a #.
func (k bucketKeys) markOf(bucket string) string {
	if k.tagged {
		return k.prefix + ":#" + bucket
	}
	return k.prefix + ":#{" + bucket + "}"
}

// slot is that of a client key's buckets in a Redis Cluster.
func (k bucketKeys) slot(clientKey string) uint16 {
	var scratch [plainKeyLimit]byte
	return slotOf(k.appendClient(scratch[:0], clientKey))
}

// appendClient writes what stands for a client key.
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

// appendRule writes the algorithm and the window in the largest unit that
// holds it exactly.
func appendRule(b []byte, limit *store.Limit) []byte {
	switch limit.Algorithm {
	case store.FixedWindow:
		b = append(b, "fw"...)
	case store.SlidingWindow:
		b = append(b, "sw"...)
	case store.SlidingLog:
		b = append(b, "sl"...)
	case store.GCRA:
		b = append(b, "gcra"...)
	case store.Concurrency:
		b = append(b, "cc"...)
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

func appendDigest(b []byte, mark byte, sum []byte) []byte {
	return base64.RawURLEncoding.AppendEncode(append(b, mark), sum[:digestBytes])
}

// isPlain tells whether a client key can be stored as it is: short, printable,
// without braces, which mean something to Redis Cluster, and not to be taken
// for a digest.
func isPlain(key string) bool {
	if len(key) == 0 || len(key) > plainKeyLimit || key[0] == digestMark || key[0] == secretMark {
		return false
	}
	for i := range len(key) {
		if c := key[i]; c <= ' ' || c >= 0x7f || c == '{' || c == '}' {
			return false
		}
	}
	return true
}

// slotCount is how many slots the keys of a Redis Cluster are spread over.
const slotCount = 1 << 14

// slotOf returns the slot of a hash tag: its CRC-16 (XMODEM), by which Redis
// Cluster spreads keys.
func slotOf(tag []byte) uint16 {
	var crc uint16
	for _, b := range tag {
		crc = crc<<8 ^ crcTable[byte(crc>>8)^b]
	}
	return crc % slotCount
}

// crcTable has the effect of each byte on the CRC.
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

// rendezvous chooses a shard for a client key by weighted rendezvous hashing:
// every shard gets a score for the key, and the highest wins. Adding a shard
// moves only the keys that the new shard wins.
type rendezvous struct {
	seeds   []uint64
	weights []float64
	equal   bool
}

// newRendezvous depends on the shards' names and weights, not on their order.
func newRendezvous(names []string, weights []int) *rendezvous {
	r := &rendezvous{equal: true}
	for i, name := range names {
		r.seeds = append(r.seeds, xxhash.Sum64String(name))
		r.weights = append(r.weights, float64(weights[i]))
		r.equal = r.equal && weights[i] == weights[0]
	}
	return r
}

// owner returns the index of the shard that owns key.
func (r *rendezvous) owner(key string) int {
	if len(r.seeds) == 1 {
		return 0
	}
	hash := xxhash.Sum64String(key)
	best, bestScore := 0, math.Inf(-1)
	for i, seed := range r.seeds {
		// 53 bits: what a float64 holds exactly.
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
