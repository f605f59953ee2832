package libraries

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/csv"
	"errors"
	"fmt"
	"math"
	"net"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/process"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/luascripts"
)

// ceiling is what redis-benchmark, which does nothing with the replies, reached
// in one round with the script of a Take.
type ceiling struct {
	// rate is calls of the script per second.
	rate float64
	// server is microseconds of the server's CPU time per call.
	server float64
}

// What redis-benchmark is told: connections, and how many calls are on the way
// on each.
const (
	ceilingConnections = 50
	ceilingPipeline    = 30
)

// openings are more calls than it takes to open every client's window.
const openings = 20_000

// measureCeiling opens all windows, which tells how many calls fit into the
// time, and measures those.
func measureCeiling(ctx context.Context, server *redistest.Server, length time.Duration) (ceiling, error) {
	if err := empty(server); err != nil {
		return ceiling{}, err
	}
	script, err := ceilingScript(time.Now())
	if err != nil {
		return ceiling{}, err
	}
	sha, err := server.Client().ScriptLoad(ctx, script).Result()
	if err != nil {
		return ceiling{}, fmt.Errorf("load the script: %w", err)
	}
	rate, err := benchmark(ctx, server.Addr(), sha, openings)
	if err != nil {
		return ceiling{}, err
	}
	n := max(int(rate*length.Seconds()), ceilingConnections*ceilingPipeline)
	before, err := server.CPU()
	if err != nil {
		return ceiling{}, err
	}
	if rate, err = benchmark(ctx, server.Addr(), sha, n); err != nil {
		return ceiling{}, err
	}
	after, err := server.CPU()
	if err != nil {
		return ceiling{}, err
	}
	return ceiling{rate: rate, server: micros(after-before) / float64(n)}, nil
}

// benchmark runs redis-benchmark and returns calls per second. An argument has
// no room for packed numbers, in which there are zeros: in their place is a text
// of the same length, for they are in the script.
func benchmark(ctx context.Context, addr, sha string, n int) (float64, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return 0, fmt.Errorf("find the server: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	benchmark, err := process.Find("redis-benchmark")
	if err != nil {
		return 0, err
	}
	cmd := exec.CommandContext(ctx, benchmark, "-h", host, "-p", port, "--csv",
		"-c", strconv.Itoa(ceilingConnections), "-P", strconv.Itoa(ceilingPipeline),
		"-n", strconv.Itoa(n), "-r", strconv.Itoa(len(clientKeys)),
		"evalsha", sha, "1", "rl:1:bench:fw3600s:__rand_int__", "take", strings.Repeat("-", len(ceilingNumbers(0))))
	out, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			err = fmt.Errorf("%w: %s", err, exit.Stderr)
		}
		return 0, fmt.Errorf("run redis-benchmark: %w", err)
	}
	return parseRate(out)
}

// parseRate reads the requests per second of the only test in redis-benchmark's
// table.
func parseRate(table []byte) (float64, error) {
	rows, err := csv.NewReader(bytes.NewReader(table)).ReadAll()
	if err != nil {
		return 0, fmt.Errorf("read what redis-benchmark says: %w", err)
	}
	if len(rows) != 2 || !slices.Contains(rows[0], "rps") {
		return 0, fmt.Errorf("read what redis-benchmark says: %q", table)
	}
	rate, err := strconv.ParseFloat(rows[1][slices.Index(rows[0], "rps")], 64)
	if err != nil {
		return 0, fmt.Errorf("read what redis-benchmark says: %w", err)
	}
	return rate, nil
}

// numbersOf is how the script reads its numbers.
const numbersOf = "struct.unpack('<ddddd', ARGV[2])"

// ceilingScript is that of a fixed window with the numbers of a Take in it, of
// an instant that the server's clock has passed.
func ceilingScript(passed time.Time) (string, error) {
	if strings.Count(luascripts.FixedWindow, numbersOf) != 1 {
		return "", fmt.Errorf("the script lacks %q", numbersOf)
	}
	var literal strings.Builder
	for _, b := range ceilingNumbers(passed.UnixMicro()) {
		fmt.Fprintf(&literal, `\%03d`, b)
	}
	with := strings.Replace(numbersOf, "ARGV[2]", "'"+literal.String()+"'", 1)
	return strings.Replace(luascripts.FixedWindow, numbersOf, with, 1), nil
}

// ceilingNumbers are the script's numbers, packed: the instant, the window, the
// cost, the capacity, and that the window is not aligned.
func ceilingNumbers(passed int64) (packed []byte) {
	for _, n := range []int64{-passed, time.Hour.Microseconds(), 1, plenty, 0} {
		packed = binary.LittleEndian.AppendUint64(packed, math.Float64bits(float64(n)))
	}
	return packed
}
