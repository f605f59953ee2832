package shardlimit_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
)

var update = flag.Bool("update", false, "write what Caddyfiles adapt to into the goldens in testdata")

// goldenLine separates a golden's Caddyfile from the JSON or error that it adapts to.
const goldenLine = "\n----------\n"

func TestCaddyfileGoldens(t *testing.T) {
	files, err := filepath.Glob("testdata/*.caddyfiletest")
	if err != nil || len(files) == 0 {
		t.Fatalf("find goldens: %v, %d files", err, len(files))
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".caddyfiletest"), func(t *testing.T) { testGolden(t, file) })
	}
}

func testGolden(t *testing.T, file string) {
	text, err := os.ReadFile(file)
	must(t, "read the golden", err)
	caddyfile, expected, ok := strings.Cut(string(text), goldenLine)
	if !ok {
		t.Fatalf("%s has no line of dashes between the Caddyfile and what it adapts to", file)
	}
	caddyfile += "\n"
	config, adaptErr := adapt(caddyfile)
	got := string(config)
	if adaptErr != nil {
		got = adaptErr.Error() + "\n"
	}
	if *update && got != expected {
		must(t, "write the golden", os.WriteFile(file, []byte(strings.TrimSuffix(caddyfile, "\n")+goldenLine+got), 0o600))
		expected = got
	}
	if got != expected {
		t.Errorf("adapts to\n%swant\n%s", got, expected)
	}
	isError := strings.HasPrefix(filepath.Base(file), "error_")
	switch {
	case isError != (adaptErr != nil):
		t.Errorf("the name of a golden begins with error_ if its Caddyfile does not adapt; error: %v", adaptErr)
	case isError && !placed.MatchString(got):
		t.Errorf("the error names no line: %s", got)
	case isError || needsFile.MatchString(got):
		// There is nothing to load, or not without that file.
	default:
		setPlaceholders(t, config)
		if err := validate(config); err != nil {
			t.Errorf("adapts, but does not load: %v", err)
		}
	}
}

var (
	placed    = regexp.MustCompile(`Caddyfile:\d+`)
	envNames  = regexp.MustCompile(`\{env\.(\w+)\}`)
	needsFile = regexp.MustCompile(`\{file\.|"(ca|cert)":`)
)

// setPlaceholders sets a config's environment variables to distinct values, as addresses must be.
func setPlaceholders(t *testing.T, config []byte) {
	for i, match := range envNames.FindAllSubmatch(config, -1) {
		t.Setenv(string(match[1]), fmt.Sprintf("10.0.0.%d", i+1))
	}
}

// adapt returns the JSON that a Caddyfile adapts to.
func adapt(caddyfile string) ([]byte, error) {
	config, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(caddyfile), nil)
	if err != nil {
		return nil, err
	}
	var indented bytes.Buffer
	if err := json.Indent(&indented, config, "", "\t"); err != nil {
		return nil, err
	}
	return append(indented.Bytes(), '\n'), nil
}

// validate loads a config and unloads it before anything starts, as
// `caddy validate` does.
func validate(config []byte) error {
	parsed := new(caddy.Config)
	if err := caddy.StrictUnmarshalJSON(config, parsed); err != nil {
		return err
	}
	// Validation needs no admin endpoint, which would take a port.
	parsed.Admin = &caddy.AdminConfig{Disabled: true}
	parsed.Logging = &caddy.Logging{Logs: map[string]*caddy.CustomLog{
		caddy.DefaultLoggerName: {BaseLog: caddy.BaseLog{WriterRaw: []byte(`{"output":"discard"}`)}},
	}}
	return caddy.Validate(parsed)
}
