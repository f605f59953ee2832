//go:build check

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
		"make": "brew install make", "redis-server": "brew install redis", "nginx": "brew install nginx",
		"chromium": "brew install --cask chromium", "cc": "xcode-select --install",
	}
	dir := t.TempDir()
	for name, script := range map[string]string{"uname": "echo Darwin", "go": "echo no-compiler"} {
		writeProgram(t, filepath.Join(dir, name), script)
	}
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), bash, installer(t))
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

// installer returns the script, after looking at it: Go's cache of test results sees only what a
// test itself looks at.
func installer(t *testing.T) string {
	t.Helper()
	const script = "../../scripts/install-needed.sh"
	if _, err := os.Stat(script); err != nil {
		t.Fatal(err)
	}
	return script
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// TestInstallerLeavesNoService installs Redis and nginx into a folder, with stand-ins for
// Debian's programs: the server of Redis comes without its service, and an nginx that would
// still start with the machine is an error.
func TestInstallerLeavesNoService(t *testing.T) {
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ name, disable, fails string }{
		{"disabled", `rm "$INSTALL_ROOT"/etc/rc2.d/S01nginx "$INSTALL_ROOT"/etc/systemd/system/multi-user.target.wants/nginx.service`, ""},
		{"init script left", `rm "$INSTALL_ROOT"/etc/systemd/system/multi-user.target.wants/nginx.service`, "S01nginx"},
		{"unit left", `rm "$INSTALL_ROOT"/etc/rc2.d/S01nginx`, "nginx.service"},
	} {
		t.Run(c.name, func(t *testing.T) {
			root, programs := t.TempDir(), t.TempDir()
			for name, script := range map[string]string{
				"apt-get": `echo "$*" >>"$INSTALL_ROOT/calls"
					case "$*" in *" nginx") ` + aptInstallsNginx + ` ;; esac`,
				"update-rc.d": `test "$*" = "nginx disable" && ` + c.disable,
			} {
				writeProgram(t, filepath.Join(programs, name), script)
			}
			writeProgram(t, filepath.Join(root, "usr", "sbin", "policy-rc.d"), "echo the policy of this machine")
			writeProgram(t, filepath.Join(root, "usr", "bin", "redis-check-rdb"), "echo a server")
			cmd := exec.CommandContext(t.Context(), bash, installer(t), "as-root", "redis-tools", "nginx")
			cmd.Env = append(os.Environ(), "PATH="+programs+":"+os.Getenv("PATH"), "INSTALL_ROOT="+root)
			out, err := cmd.CombinedOutput()
			if (err != nil) != (c.fails != "") || !strings.Contains(string(out), c.fails) {
				t.Errorf("%v:\n%s", err, out)
			}
			if out, err := exec.CommandContext(t.Context(), filepath.Join(root, "usr", "local", "bin", "redis-server")).Output(); err != nil || string(out) != "a server\n" {
				t.Errorf("redis-server: %v, %q", err, out)
			}
			if denied, err := os.ReadFile(filepath.Join(root, "denied")); err != nil || string(denied) != "101\n" {
				t.Errorf("the start of nginx: %v, status %q", err, denied)
			}
			if out, err := exec.CommandContext(t.Context(), filepath.Join(root, "usr", "sbin", "policy-rc.d")).Output(); err != nil || string(out) != "the policy of this machine\n" {
				t.Errorf("the policy: %v, %q", err, out)
			}
			calls, err := os.ReadFile(filepath.Join(root, "calls"))
			if err != nil || strings.Contains(string(calls), "redis-server") {
				t.Errorf("%v: apt-get was called with %s", err, calls)
			}
		})
	}
}

// aptInstallsNginx does what matters of a package with a service: it asks the policy whether
// to start it now, and has it started at the next boot.
const aptInstallsNginx = `
	"$INSTALL_ROOT/usr/sbin/policy-rc.d" nginx start && status=0 || status=$?
	echo $status >"$INSTALL_ROOT/denied"
	for link in rc2.d/S01nginx systemd/system/multi-user.target.wants/nginx.service; do
		mkdir -p "$(dirname "$INSTALL_ROOT/etc/$link")"
		: >"$INSTALL_ROOT/etc/$link"
	done`

func writeProgram(t *testing.T, path, script string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+script+"\n"), 0o700); err != nil {
		t.Fatal(err)
	}
}

// TestFindSaysHowToInstall: the error names a package that has the program.
func TestFindSaysHowToInstall(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	for program, want := range map[string][]string{
		"redis-server": {"apt-get install redis-server", "brew install redis"},
		"chromium":     {"apt-get install chromium", "brew install --cask chromium"},
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
