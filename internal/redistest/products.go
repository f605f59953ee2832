package redistest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/process"
)

// familyVariable has the paths of other servers of the family, with colons between them.
const familyVariable = "REDISTEST_FAMILY"

// Family returns the programs of the servers that a test of several products runs with: the
// one of all tests, and those that REDISTEST_FAMILY names.
func Family() (programs []string, err error) {
	own, err := serverProgram()
	if err != nil {
		return nil, err
	}
	programs = append(programs, own)
	for _, program := range filepath.SplitList(os.Getenv(familyVariable)) {
		if program == "" {
			continue
		}
		if _, err := os.Stat(program); err != nil {
			return nil, fmt.Errorf("%s: %w; make servers brings some into bin/servers", familyVariable, err)
		}
		programs = append(programs, program)
	}
	return programs, nil
}

// Program makes a server run another program than that of all tests, by its path.
func Program(path string) Option {
	return func(o *options) { o.program = path }
}

// StartTwemproxy starts a twemproxy in front of these servers, over which it spreads the keys,
// for the time of a test. It returns its address.
func StartTwemproxy(tb testing.TB, upstreams ...string) string {
	tb.Helper()
	config := func(addr string) string {
		lines := "all:\n  listen: " + addr + "\n  redis: true\n  hash: fnv1a_64\n  distribution: modula\n  server_connections: 4\n  servers:\n"
		for _, upstream := range upstreams {
			lines += "   - " + upstream + ":1\n"
		}
		return lines
	}
	return startProduct(tb, "nutcracker", config, func(file string, statistics int) []string {
		return []string{"-c", file, "-a", loopback, "-s", strconv.Itoa(statistics), "-v", "4"}
	})
}

// StartHAProxy starts an HAProxy that passes connections to a server, for the time of a test.
// It returns its address.
func StartHAProxy(tb testing.TB, upstream string) string {
	tb.Helper()
	config := func(addr string) string {
		return "defaults\n  mode tcp\n  timeout connect 1s\n  timeout client 1m\n  timeout server 1m\n" +
			"listen redis\n  bind " + addr + "\n  server redis " + upstream + "\n"
	}
	return startProduct(tb, "haproxy", config, func(file string, _ int) []string { return []string{"-db", "-f", file} })
}

// startProduct runs a program, with a file of configuration for an address and arguments, until
// the test ends, and returns the address once it takes connections.
func startProduct(tb testing.TB, program string, config func(addr string) string, arguments func(file string, other int) []string) string {
	tb.Helper()
	addr, stop, err := launchProduct(program, config, arguments)
	return stopAfter(tb, addr, err, stop)
}

func launchProduct(program string, config func(addr string) string, arguments func(file string, other int) []string) (addr string, stop func() error, err error) {
	binary, err := process.Find(program)
	if err != nil {
		return "", nil, err
	}
	var ports [2]*port
	for i := range ports {
		if ports[i], err = reservePort(); err != nil {
			return "", nil, err
		}
	}
	dir, err := os.MkdirTemp("", "redistest-")
	if err != nil {
		return "", nil, fmt.Errorf("make the directory of %s: %w", program, err)
	}
	file := filepath.Join(dir, program+".conf")
	addr = ports[0].addr()
	if err := os.WriteFile(file, []byte(config(addr)), 0o600); err != nil {
		return "", nil, fmt.Errorf("write the configuration of %s: %w", program, err)
	}
	running, err := watch(dir, append([]string{binary}, arguments(file, ports[1].number)...))
	if err != nil {
		return "", nil, err
	}
	stop = func() error {
		err := errors.Join(running.kill(), running.end())
		for _, p := range ports {
			err = errors.Join(err, p.release())
		}
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), waitTimeout)
	defer cancel()
	err = poll(ctx, func() error {
		conn, err := net.DialTimeout("tcp", addr, answerTimeout)
		if err != nil {
			return err
		}
		return conn.Close()
	})
	if err != nil {
		err = fmt.Errorf("start %s: %w; log: %s", program, err, strings.TrimSpace(serverLog(dir)))
		return "", nil, errors.Join(err, stop())
	}
	return addr, stop, nil
}
