//go:build check

package process_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// checkout is a checkout of its own, with the installer and stand-ins for the programs of the system:
// none of those that the tests need is there.
type checkout struct {
	t        *testing.T
	dir, bin string
}

func newCheckout(t *testing.T) checkout {
	t.Helper()
	c := checkout{t, t.TempDir(), t.TempDir()}
	script, err := os.ReadFile(installer(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(c.dir, "scripts"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(c.dir, "scripts", "install-needed.sh"), script, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, program := range []string{"bash", "cat", "chmod", "dirname", "find", "ln", "mkdir", "mktemp", "paste", "rm", "sort"} {
		path, err := exec.LookPath(program)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(path, filepath.Join(c.bin, program)); err != nil {
			t.Fatal(err)
		}
	}
	c.has("go", "echo no-compiler")
	c.has("id", "case $1 in -u) echo 1000 ;; *) echo somebody ;; esac")
	// A package is a file with its name, at the end of the command.
	c.has("apt-get", `for last; do :; done
		case "$*" in
		*update) ;;
		*" -o Debug::NoLocking=1 "*"Dir::Cache="*download-only*) cache=${*#*Dir::Cache=}; echo $last >"${cache%% *}/archives/$last.deb" ;;
		*) echo "apt-get $*" >>"`+c.dir+`/calls" ;;
		esac`)
	c.has("dpkg", `mkdir -p "$3/usr/bin"
		printf '#!/bin/sh\necho "$(cat '"$2"' 2>&1)" runs\n' >"$3/usr/bin/redis-check-rdb"
		chmod +x "$3/usr/bin/redis-check-rdb"`)
	c.has("sudo", `echo "sudo $*" >>"`+c.dir+`/calls"`)
	return c
}

// has makes a program of the system.
func (c checkout) has(program, script string) {
	c.t.Helper()
	writeProgram(c.t, filepath.Join(c.bin, program), script)
}

// lacks removes a program of the system.
func (c checkout) lacks(program string) {
	c.t.Helper()
	if err := os.Remove(filepath.Join(c.bin, program)); err != nil {
		c.t.Fatal(err)
	}
}

// install runs the installer without a terminal, and returns what it prints, and whether it succeeds.
func (c checkout) install(env string, programs ...string) (out string, ok bool) {
	c.t.Helper()
	return c.run(env, exec.CommandContext(c.t.Context(), filepath.Join(c.bin, "bash"), append([]string{c.script()}, programs...)...))
}

func (c checkout) script() string { return filepath.Join(c.dir, "scripts", "install-needed.sh") }

func (c checkout) run(env string, cmd *exec.Cmd) (out string, ok bool) {
	c.t.Helper()
	cmd.Env = []string{"PATH=" + c.bin, "TMPDIR=" + c.t.TempDir(), env}
	b, err := cmd.CombinedOutput()
	return string(b), err == nil
}

// changes returns the calls that change the system.
func (c checkout) changes() string {
	b, _ := os.ReadFile(filepath.Join(c.dir, "calls"))
	return string(b)
}

// TestInstallerUnpacksIntoTheCheckout: whoever is not root gets redis-server in bin/needed, and finds it
// there the next time; nobody is asked, and the system stays as it is.
func TestInstallerUnpacksIntoTheCheckout(t *testing.T) {
	c := newCheckout(t)
	c.lacks("sudo")
	out, ok := c.install("", "redis-server")
	if where := filepath.Join(c.dir, "bin", "needed"); !ok || !strings.HasPrefix(out, "Unpacking redis-server into "+where) {
		t.Errorf("succeeds: %v:\n%s", ok, out)
	}
	if out, ok := c.run("", exec.CommandContext(t.Context(), filepath.Join(c.dir, "bin", "needed", "redis-server"))); !ok || !strings.Contains(out, "runs") {
		t.Errorf("redis-server: %s", out)
	}
	if out, ok := c.install("", "redis-server"); !ok || out != "" {
		t.Errorf("the second time it says %s", out)
	}
	if changes := c.changes(); changes != "" {
		t.Errorf("the system is changed: %s", changes)
	}
}

// TestInstallerLeavesOutWhatDoesNotRun: if what is unpacked does not run, it is installed into the
// system, which needs a yes.
func TestInstallerLeavesOutWhatDoesNotRun(t *testing.T) {
	c := newCheckout(t)
	c.has("dpkg", `mkdir -p "$3/usr/bin"; printf '#!/bin/sh\necho lacks a library; exit 1\n' >"$3/usr/bin/redis-check-rdb"; chmod +x "$3/usr/bin/redis-check-rdb"`)
	out, ok := c.install("", "redis-server")
	if ok || !strings.Contains(out, "lacks a library") || !strings.HasSuffix(out, "apt-get install redis-tools\n") {
		t.Errorf("succeeds: %v:\n%s", ok, out)
	}
	if exists(filepath.Join(c.dir, "bin", "needed", "redis-server")) {
		t.Error("what does not run is left in bin/needed")
	}
}

// TestInstallerAsksBeforeItChangesTheSystem: a C compiler does not work from a folder. With CI=true it
// is installed by sudo, at a terminal after a yes; otherwise the installer says the command, and fails.
func TestInstallerAsksBeforeItChangesTheSystem(t *testing.T) {
	const byHand = "The tests need cc. Please install it as root: apt-get install gcc libc6-dev\n"
	t.Run("no terminal", func(t *testing.T) {
		c := newCheckout(t)
		if out, ok := c.install("", "cc"); ok || out != byHand || c.changes() != "" {
			t.Errorf("succeeds: %v, changes %q:\n%s", ok, c.changes(), out)
		}
	})
	t.Run("CI", func(t *testing.T) {
		c := newCheckout(t)
		if out, ok := c.install("CI=true", "cc"); !ok || c.changes() != "sudo "+c.script()+" as-root gcc libc6-dev\n" {
			t.Errorf("succeeds: %v, changes %q:\n%s", ok, c.changes(), out)
		}
	})
	t.Run("CI without sudo", func(t *testing.T) {
		c := newCheckout(t)
		c.lacks("sudo")
		if out, ok := c.install("CI=true", "cc"); ok || out != byHand {
			t.Errorf("succeeds: %v:\n%s", ok, out)
		}
	})
	t.Run("root", func(t *testing.T) {
		c := newCheckout(t)
		c.has("id", "echo 0")
		c.has("mv", "")
		c.has("grep", "exit 1")
		root := t.TempDir()
		if err := os.MkdirAll(filepath.Join(root, "usr", "sbin"), 0o700); err != nil {
			t.Fatal(err)
		}
		out, ok := c.install("INSTALL_ROOT="+root, "cc")
		if !ok || !strings.HasPrefix(out, "Installing gcc libc6-dev into the system") || !strings.Contains(c.changes(), "install --no-install-recommends gcc") {
			t.Errorf("succeeds: %v, changes %q:\n%s", ok, c.changes(), out)
		}
	})
	script, err := exec.LookPath("script")
	if err != nil {
		t.Fatalf("%v: install bsdutils, whose script gives a terminal", err)
	}
	for answer, want := range map[string]bool{"y": true, "n": false, "": false} {
		t.Run("answer "+answer, func(t *testing.T) {
			c := newCheckout(t)
			cmd := exec.CommandContext(t.Context(), script, "-qec", c.script()+" cc", os.DevNull)
			cmd.Stdin = strings.NewReader(answer + "\n")
			out, ok := c.run("SHELL="+filepath.Join(c.bin, "bash"), cmd)
			if ok != want || !strings.Contains(out, "Install gcc libc6-dev into the system, with sudo and apt-get? [y/N]") || (c.changes() != "") != want {
				t.Errorf("succeeds: %v, changes %q:\n%s", ok, c.changes(), out)
			}
		})
	}
}

// TestMakeTestSaysFirst checks that make test prints its duration before it begins, and installs nothing that is there.
func TestMakeTestSaysFirst(t *testing.T) {
	c := newCheckout(t)
	path, err := exec.LookPath("make")
	if err != nil {
		t.Fatalf("%v: install make", err)
	}
	makefile, err := filepath.Abs("../../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	c.has("redis-server", "")
	c.has("echo", `printf '%s\n' "$*"`)
	cmd := exec.CommandContext(t.Context(), path, "-f", makefile, "test", "GO=echo go", "LIST_TESTED=echo ./...")
	cmd.Dir = c.dir
	out, ok := c.run("", cmd)
	lines := strings.Split(strings.TrimSpace(out), "\n")
	if !ok || len(lines) != 2 || !strings.Contains(lines[0], "about three minutes") || !strings.HasPrefix(lines[1], "go run ./scripts/cputime") || c.changes() != "" {
		t.Errorf("succeeds: %v, changes %q:\n%s", ok, c.changes(), out)
	}
}
