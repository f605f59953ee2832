//go:build check

package simredis

// Held is the number of keys in memory, those that have expired included.
func Held(s *Server) int { return len(s.keys) }
