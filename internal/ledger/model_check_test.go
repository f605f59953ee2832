//go:build check

package ledger

func init() { interleavings = 2000 }
