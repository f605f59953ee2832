//go:build check

package ledger

func init() { reshardings = 40 }
