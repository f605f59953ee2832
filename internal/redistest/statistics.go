package redistest

import (
	"fmt"
	"strconv"
	"strings"
)

// Calls is how often the server has run each command since it was started, by
// the command's name in lower case. What scripts run counts as well.
func (s *Server) Calls() (map[string]int64, error) {
	stats, err := s.Info("commandstats")
	if err != nil {
		return nil, err
	}
	return parseCalls(stats)
}

// readers are the commands by which fixed windows and leases are read, by scripts
// as well: each reads its bucket once, but for a charge that finds no open window.
var readers = []string{"hget", "hmget", "zcard"}

// Asked is how often the server was asked about a bucket, or to change it, since
// it was started. Scripts that are run for several buckets at once count as often.
func (s *Server) Asked() (sum int64, err error) {
	calls, err := s.Calls()
	for _, name := range readers {
		sum += calls[name]
	}
	return sum, err
}

func parseCalls(stats map[string]string) (map[string]int64, error) {
	calls := make(map[string]int64, len(stats))
	for field, text := range stats {
		name, ok := strings.CutPrefix(field, "cmdstat_")
		if !ok {
			continue
		}
		first, _, _ := strings.Cut(text, ",")
		n, err := strconv.ParseInt(strings.TrimPrefix(first, "calls="), 10, 64)
		if err != nil {
			return nil, fmt.Errorf("read the calls of %s from %q: %w", name, text, err)
		}
		calls[name] = n
	}
	return calls, nil
}
