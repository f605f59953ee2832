package redis

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"strconv"
	"time"

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
