// Package machine says on what something was measured.
package machine

import (
	"os"
	"os/exec"
	"strings"
)

// Processor is the name of the processor, or "unknown processor".
func Processor() string {
	b, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return "unknown processor"
	}
	for line := range strings.Lines(string(b)) {
		if name, ok := strings.CutPrefix(line, "model name"); ok {
			return strings.TrimSpace(strings.TrimLeft(name, "\t :"))
		}
	}
	return "unknown processor"
}

// Redis is the version of redis-server, such as "Redis 7.0.15", or "unknown
// Redis".
func Redis() string {
	b, err := exec.Command("redis-server", "--version").Output()
	fields := strings.Fields(string(b))
	if err != nil || len(fields) < 3 {
		return "unknown Redis"
	}
	return "Redis " + strings.TrimPrefix(fields[2], "v=")
}

// Wrk is the version of wrk, such as "wrk 4.1.0", or "no wrk".
func Wrk() string {
	// It tells its version together with how it is used, and fails.
	b, _ := exec.Command("wrk", "-v").Output()
	return wrkVersion(string(b))
}

// wrkVersion is the version in what wrk tells. Debian puts its own name before it.
func wrkVersion(told string) string {
	fields := strings.Fields(told)
	if len(fields) < 2 || fields[0] != "wrk" {
		return "no wrk"
	}
	return "wrk " + strings.TrimPrefix(fields[1], "debian/")
}
