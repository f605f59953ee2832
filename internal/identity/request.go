package identity

import (
	"encoding/base64"
	"encoding/binary"
	"math/rand/v2"
)

// NewRequestID returns an ID that no other request has.
func NewRequestID() string {
	b := binary.LittleEndian.AppendUint64(make([]byte, 0, 8), rand.Uint64())
	return base64.RawURLEncoding.EncodeToString(b)
}
