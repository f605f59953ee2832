package process_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/process"
)

// TestInstallerNamesWhatIsMissing runs the installer where there is neither
// apt-get nor any of the programs: it fails, and says what to install.
func TestInstallerNamesWhatIsMissing(t *testing.T) {
	missing := map[string]string{
		"make": "brew install make", "redis-server": "brew install redis", "promtool": "brew install prometheus",
		"nginx": "brew install nginx", "chromium": "brew install --cask chromium", "cc": "xcode-select --install",
	}
	dir := t.TempDir()
	for name, script := range map[string]string{"uname": "echo Darwin", "go": "echo no-compiler"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script+"\n"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), bash, "../../scripts/install-needed.sh")
	cmd.Env = []string{"PATH=" + dir}
	out, err := cmd.CombinedOutput()
	if err == nil {
		t.Errorf("the installer succeeds:\n%s", out)
	}
	for program, command := range missing {
		if program == "nginx" && exists("/usr/sbin/nginx") {
			continue // found where the PATH does not lead
		}
		for _, want := range []string{program, command + "\n"} {
			if !strings.Contains(string(out), want) {
				t.Errorf("%q is not mentioned:\n%s", want, out)
			}
		}
	}
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// TestFindSaysHowToInstall: the error names the packages that the installer
// installs.
func TestFindSaysHowToInstall(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	for program, want := range map[string][]string{
		"redis-server": {"apt-get install redis-server", "brew install redis"},
		"promtool":     {"apt-get install prometheus", "brew install prometheus"},
		"spin":         {"apt-get install spin", "brew install spin"},
	} {
		path, err := process.Find(program)
		if err == nil {
			t.Errorf("%s is found at %s", program, path)
			continue
		}
		if !strings.Contains(err.Error(), want[0]) && !strings.Contains(err.Error(), want[1]) {
			t.Errorf("the error of %s is %q", program, err)
		}
	}
}
