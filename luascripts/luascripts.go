// Package luascripts embeds the scripts that a Redis store runs. Each touches
// exactly the key in KEYS[1]; its file says what it takes and replies.
package luascripts

import _ "embed"

// FixedWindowCheck reads a bucket; it writes nothing and may run on replicas.
//
//go:embed fixed_window_check.lua
var FixedWindowCheck string

// FixedWindowOpen reads a bucket and opens a window if none is open.
//
//go:embed fixed_window_open.lua
var FixedWindowOpen string

// FixedWindowCharge spends in a bucket.
//
//go:embed fixed_window_charge.lua
var FixedWindowCharge string
