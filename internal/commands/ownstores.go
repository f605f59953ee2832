package commands

import (
	"encoding/json"

	"github.com/shardlimit/caddy-shardlimit/internal/stores"
)

// addOwnStores adds the stores that handlers in a value of JSON have for themselves, and
// reports whether there are handlers.
func addOwnStores(own map[string]any, value any) (isUsed bool) {
	switch value := value.(type) {
	case map[string]any:
		if isUsed = isLimiting(value); isUsed {
			if store, ok := value["store"].(map[string]any); ok {
				// Caddy encodes what a handler contains in the same way.
				text, _ := json.Marshal(store)
				own[stores.OwnName(text)] = store
			}
		}
		for _, child := range value {
			isUsed = addOwnStores(own, child) || isUsed
		}
	case []any:
		for _, child := range value {
			isUsed = addOwnStores(own, child) || isUsed
		}
	}
	return isUsed
}

// isLimiting reports whether a value of JSON is a handler with limits.
func isLimiting(value map[string]any) bool {
	return value["handler"] == "rate_limit" || value["handler"] == "rate_limit_service"
}

// nameOwnStores makes handlers in a value of JSON name the stores that they have for themselves.
func nameOwnStores(value any) {
	switch value := value.(type) {
	case map[string]any:
		if s, ok := value["store"].(map[string]any); ok && isLimiting(value) {
			// As addOwnStores does.
			text, _ := json.Marshal(s)
			value["store"] = stores.OwnName(text)
		}
		for _, child := range value {
			nameOwnStores(child)
		}
	case []any:
		for _, child := range value {
			nameOwnStores(child)
		}
	}
}
