package shardlimit

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestCredentialsAreReadForEachConnection, and a file that is away yields an
// error and no empty password.
func TestCredentialsAreReadForEachConnection(t *testing.T) {
	file := filepath.Join(t.TempDir(), "password")
	t.Setenv("SHARDLIMIT_TEST_USER", "limiter")
	provide := credentials{username: "{env.SHARDLIMIT_TEST_USER}", password: "{file." + file + "}"}.provider()
	for _, step := range []struct{ content, want string }{
		{"first", "first"},
		{"second\n", "second"},
		{"third\r\n", "third"},
		// More than one line end is somebody's password.
		{"fourth\n\n", "fourth\n"},
		{" a b{c} ", " a b{c} "},
	} {
		if err := os.WriteFile(file, []byte(step.content), 0o600); err != nil {
			t.Fatal(err)
		}
		username, password, err := provide(t.Context())
		if err != nil || username != "limiter" || password != step.want {
			t.Errorf("a file with %q yields %q, %q, %v, want %q", step.content, username, password, err, step.want)
		}
	}
	for what, change := range map[string]func() error{
		"empty file":   func() error { return os.WriteFile(file, nil, 0o600) },
		"missing file": func() error { return os.Remove(file) },
	} {
		if err := change(); err != nil {
			t.Fatal(err)
		}
		_, password, err := provide(t.Context())
		if err == nil || password != "" || !strings.Contains(err.Error(), "password: placeholder {file."+file+"} is empty") {
			t.Errorf("%s: %q, %v", what, password, err)
		}
		if err := os.WriteFile(file, []byte("secret"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if (credentials{}).provider() != nil {
		t.Error("none are asked for all the same")
	}
}
