// Package process holds what tests, benchmarks and demonstrations need of the
// operating system: processes that end with this one, processes that stand still,
// processor time, reserved ports, and where programs are installed.
// What only Linux has comes with a portable twin, so that everything compiles
// wherever the limiter does.
package process

import (
	"fmt"
	"os/exec"
	"runtime"
)

// Find returns the path of a program that the tests need. The error says how to
// install it, as Debian's and as Homebrew's package.
func Find(program string) (string, error) {
	for _, name := range alternatives(program) {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	p, ok := packages[program]
	if !ok {
		p = pkg{program, program}
	}
	if runtime.GOOS == "darwin" {
		return "", fmt.Errorf("%s is not installed: brew install %s", program, p.homebrew)
	}
	return "", fmt.Errorf("%s is not installed: run scripts/install-needed.sh and append bin/needed to the PATH, or apt-get install %s", program, p.debian)
}

// pkg is what a program's package is called.
type pkg struct{ debian, homebrew string }

var packages = map[string]pkg{
	"redis-server":    {"redis-server", "redis"},
	"redis-benchmark": {"redis-tools", "redis"},
	"chromium":        {"chromium", "--cask chromium"},
	"nutcracker":      {"nutcracker", "twemproxy"},
	"node":            {"nodejs", "node"},
	"php":             {"php-cli", "php"},
	"python3":         {"python3", "python"},
}

// alternatives are the names and places of a program, the usual one first.
func alternatives(program string) []string {
	switch program {
	case "nginx", "nutcracker", "haproxy":
		// Debian installs them where the PATH of an ordinary user does not lead.
		return []string{program, "/usr/sbin/" + program}
	case "chromium":
		return []string{program, "chromium-browser", "google-chrome", "/Applications/Chromium.app/Contents/MacOS/Chromium"}
	default:
		return []string{program}
	}
}
