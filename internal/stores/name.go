package stores

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
)

// DefaultName is the name of the store for handlers that name none.
const DefaultName = "default"

// OwnName returns the name of a handler's own store: an unchanged definition keeps its name, and so
// its counts.
func OwnName(definition json.RawMessage) string {
	sum := sha256.Sum256(definition)
	return "inline-" + hex.EncodeToString(sum[:6])
}
