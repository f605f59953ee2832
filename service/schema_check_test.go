//go:build check

package service_test

import (
	"encoding/json"
	"testing"

	shardlimit "github.com/shardlimit/caddy-shardlimit"
	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// TestSchema agrees with what loads, as far as a schema can.
func TestSchema(t *testing.T) {
	schema := caddytest.CompileSchema(t, new(shardlimit.App).Schema())
	for _, x := range configsInJSON {
		var value any
		caddytest.Must(t, "decode", json.Unmarshal([]byte(service(x.fields)), &value))
		if err := schema.Validate(value); (err == nil) != x.fits {
			t.Errorf("%s: the schema says %v", x.fields, err)
		}
	}
}
