//go:build check

package examples

func init() { sweepsAll = true }
