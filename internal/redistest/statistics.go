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
