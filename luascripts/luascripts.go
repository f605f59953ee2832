// Package luascripts embeds the scripts by which a Redis store writes. Each
// touches exactly the key in KEYS[1]; its file says what it takes and replies.
// Reading a bucket needs no script: one command reads it whole.
package luascripts

import _ "embed"

// FixedWindowOpen reads a bucket and opens a window if none is open.
//
//go:embed fixed_window_open.lua
var FixedWindowOpen string

// FixedWindowCharge spends in a bucket.
//
//go:embed fixed_window_charge.lua
var FixedWindowCharge string
