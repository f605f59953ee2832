//go:build build && release

package build

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// packaged are the files of the deb and the rpm.
var packaged = []string{
	"/etc/caddy/Caddyfile",
	"/usr/bin/caddy",
	"/usr/lib/systemd/system/caddy.service",
	"/usr/lib/sysusers.d/caddy.conf",
	"/usr/share/doc/caddy-shardlimit/README.md",
	"/usr/share/doc/caddy-shardlimit/copyright",
}

// TestRelease has GoReleaser, the command GORELEASER, build a release of the last commit for TARGETS,
// or for all systems of .goreleaser.yaml, without images and signatures, and looks into each
// file. It installs the deb for this machine into a folder and limits requests with its Caddy.
// `make release-check` runs it.
func TestRelease(t *testing.T) {
	t.Parallel()
	root := clone(t)
	version := tag(t, root)
	config, targets := configured(t, root, strings.Fields(strings.ReplaceAll(os.Getenv("TARGETS"), ",", " ")))
	for _, program := range []string{"dpkg", "dpkg-deb"} {
		_, err := exec.LookPath(program)
		must(t, "apt-get install dpkg", err)
	}
	goreleaser := func(args string) {
		t.Helper()
		run(t, root, append(os.Environ(), "GOFLAGS="), "bash", "-c", os.Getenv("GORELEASER")+" "+args)
	}
	goreleaser("check .goreleaser.yaml")
	goreleaser("release --config " + config + " --snapshot --clean --skip=docker,sign")

	names := map[string]string{} // what a file is, by its name
	for _, target := range targets {
		system, processor, _ := strings.Cut(target, "_")
		prefix, number := "caddy-shardlimit", strings.TrimPrefix(version, "v")
		archive := ".tar.gz"
		if system == "windows" {
			archive = ".zip"
		}
		archive = strings.Join([]string{prefix, number, system, processor}, "_") + archive
		names[archive] = "archive"
		names[archive+".sbom.json"] = "sbom"
		if system == "linux" {
			names[strings.Join([]string{prefix, number, processor}, "_")+".deb"] = "deb"
			rpm := map[string]string{"amd64": "x86_64", "arm64": "aarch64"}[processor]
			names[prefix+"-"+number+"-1."+rpm+".rpm"] = "rpm"
		}
	}
	dist := filepath.Join(root, "dist")
	must(t, "checksums", checksums(filepath.Join(dist, "checksums.txt"), names))
	entries, err := os.ReadDir(dist)
	must(t, "read", err)
	own := map[string]bool{"artifacts.json": true, "checksums.txt": true, "config.yaml": true, "metadata.json": true}
	for _, entry := range entries {
		name := entry.Name()
		if entry.IsDir() || own[name] {
			continue
		}
		file := filepath.Join(dist, name)
		switch names[name] {
		case "archive":
			inArchive(t, file)
		case "deb":
			inDeb(t, file, version)
			if strings.HasSuffix(name, "_"+runtime.GOARCH+".deb") {
				t.Run("deb", func(t *testing.T) { install(t, root, file, version) })
			}
		case "rpm":
			inRPM(t, file)
		case "sbom":
			listed(t, file)
		default:
			t.Errorf("a release has %s, which is not expected", name)
		}
		info, err := entry.Info()
		must(t, "stat", err)
		t.Logf("%s: %.1f MB", name, float64(info.Size())/1e6)
		delete(names, name)
	}
	for name := range names {
		t.Errorf("a release has no %s", name)
	}
}

// listed checks that an SBOM names Caddy and go-redis with their versions, which Syft reads from the binary.
func listed(t *testing.T, file string) {
	t.Helper()
	text, err := os.ReadFile(file)
	must(t, "read", err)
	for _, module := range []string{"github.com/caddyserver/caddy/v2", "github.com/redis/go-redis/v9"} {
		must(t, file, want("naming "+module, strings.Contains(string(text), "pkg:golang/"+module+"@v"), true))
	}
}

// configured returns a config of GoReleaser for some targets, or that of the clone, and its targets.
func configured(t *testing.T, root string, targets []string) (file string, all []string) {
	t.Helper()
	file = ".goreleaser.yaml"
	var config map[string]any
	must(t, "decode", yaml.Unmarshal([]byte(read(t, root, file)), &config))
	build := config["builds"].([]any)[0].(map[string]any)
	for _, system := range build["goos"].([]any) {
		for _, processor := range build["goarch"].([]any) {
			all = append(all, fmt.Sprint(system, "_", processor))
		}
	}
	if len(targets) == 0 {
		return file, all
	}
	for _, target := range targets {
		must(t, target, want("a target of .goreleaser.yaml", slices.Contains(all, target), true))
	}
	delete(build, "goos")
	delete(build, "goarch")
	build["targets"] = targets
	text, err := yaml.Marshal(config)
	must(t, "encode", err)
	file = filepath.Join(t.TempDir(), "goreleaser.yaml")
	write(t, file, string(text))
	return file, targets
}

// checksums returns an error unless the file has exactly the SHA-256 of the named files beside it.
func checksums(file string, names map[string]string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	listed := 0
	for line := range strings.Lines(string(text)) {
		sum, name, _ := strings.Cut(strings.TrimSpace(line), "  ")
		content, err := os.ReadFile(filepath.Join(filepath.Dir(file), name))
		if err != nil {
			return err
		}
		actual := sha256.Sum256(content)
		if names[name] == "" || sum != hex.EncodeToString(actual[:]) {
			err = fmt.Errorf("%s has %s for %s", file, sum, name)
		}
		if listed++; err != nil {
			return err
		}
	}
	return want("files with a checksum", listed, len(names))
}

// inArchive checks the files of an archive.
func inArchive(t *testing.T, file string) {
	t.Helper()
	expected := []string{"Caddyfile.example", "LICENSE", "README.md", "caddy"}
	var found []string
	if strings.HasSuffix(file, ".zip") {
		expected[3] = "caddy.exe"
		archive, err := zip.OpenReader(file)
		must(t, "open", err)
		for _, entry := range archive.File {
			found = append(found, entry.Name)
		}
		must(t, "close", archive.Close())
	} else {
		compressed, err := os.Open(file)
		must(t, "open", err)
		archive, err := gzip.NewReader(compressed)
		must(t, "decompress", err)
		found = inTar(t, archive)
		must(t, "close", compressed.Close())
	}
	slices.Sort(found)
	must(t, filepath.Base(file), want("files", strings.Join(found, " "), strings.Join(expected, " ")))
}

// inTar returns the regular files of a tar.
func inTar(t *testing.T, r io.Reader) (names []string) {
	t.Helper()
	for archive := tar.NewReader(r); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return names
		}
		must(t, "read", err)
		if header.Typeflag == tar.TypeReg {
			names = append(names, header.Name)
		}
	}
}

// inDeb checks the files of a deb, and what it says about Caddy's own package.
func inDeb(t *testing.T, file, version string) {
	t.Helper()
	found := inTar(t, strings.NewReader(run(t, "", nil, "dpkg-deb", "--fsys-tarfile", file)))
	for i, name := range found {
		found[i] = "/" + strings.TrimLeft(name, "./")
	}
	slices.Sort(found)
	field := func(name string) string { return strings.TrimSpace(run(t, "", nil, "dpkg-deb", "--field", file, name)) }
	must(t, filepath.Base(file), errors.Join(
		want("files", strings.Join(found, " "), strings.Join(packaged, " ")),
		want("version", field("Version"), strings.TrimPrefix(version, "v")),
		want("conflicts", field("Conflicts"), "caddy"), want("provides", field("Provides"), "caddy"),
		want("files that upgrades keep", strings.TrimSpace(run(t, "", nil, "dpkg-deb", "--info", file, "conffiles")), "/etc/caddy/Caddyfile"),
	))
}

// install installs a deb into a folder, limits requests with what is there, and removes it.
func install(t *testing.T, root, deb, version string) {
	dpkg := func(dir string, args ...string) *exec.Cmd {
		must(t, "make the folder", os.MkdirAll(filepath.Join(dir, "var/lib/dpkg/info"), 0o700))
		must(t, "make the folder", os.MkdirAll(filepath.Join(dir, "var/lib/dpkg/updates"), 0o700))
		status, err := os.OpenFile(filepath.Join(dir, "var/lib/dpkg/status"), os.O_CREATE, 0o600)
		must(t, "create", err)
		must(t, "close", status.Close())
		// Scripts run outside the folder, which has no shell, and no package that this one depends on.
		args = append([]string{"--root=" + dir, "--log=" + dir + "/log", "--force-not-root", "--force-script-chrootless", "--force-depends"}, args...)
		return exec.CommandContext(t.Context(), "dpkg", args...)
	}
	dir := t.TempDir()
	out, err := dpkg(dir, "--install", deb).CombinedOutput()
	must(t, "install: "+string(out), err)
	caddy, caddyfile := filepath.Join(dir, "usr/bin/caddy"), filepath.Join(dir, "etc/caddy/Caddyfile")
	find(t, run(t, dir, nil, caddy, "build-info"), `\nmod\t`+regexp.QuoteMeta(path+"\t"+version)+`\s`)
	find(t, run(t, dir, nil, caddy, "version"), `^`+regexp.QuoteMeta(find(t, read(t, root, "go.mod"), `\tgithub\.com/caddyserver/caddy/v2 (\S+)\n`)[1])+`\s`)
	run(t, dir, append(os.Environ(), "XDG_CONFIG_HOME="+dir, "XDG_DATA_HOME="+dir), caddy, "validate", "--config", caddyfile)
	limits(t, caddy, caddyfile)
	find(t, read(t, dir, "etc/passwd"), `(?m)^caddy:.*:/var/lib/caddy:`)

	out, err = dpkg(dir, "--remove", "caddy-shardlimit").CombinedOutput()
	must(t, "remove: "+string(out), err)
	_, err = os.Stat(caddy)
	must(t, "remove", want("the program being gone", os.IsNotExist(err), true))
	_, err = os.Stat(caddyfile)
	must(t, "the Caddyfile stays", err)

	// Caddy's own package is in the way, and dpkg says so.
	other, dir := t.TempDir(), t.TempDir()
	must(t, "make the folder", os.Mkdir(filepath.Join(other, "DEBIAN"), 0o755))
	write(t, filepath.Join(other, "DEBIAN/control"), "Package: caddy\nVersion: 2.6.2\nArchitecture: all\nMaintainer: nobody\nDescription: Caddy\n")
	run(t, other, nil, "dpkg-deb", "--build", other, other+".deb")
	t.Cleanup(func() { os.Remove(other + ".deb") })
	out, err = dpkg(dir, "--install", other+".deb").CombinedOutput()
	must(t, "install: "+string(out), err)
	out, err = dpkg(dir, "--install", deb).CombinedOutput()
	must(t, "installing beside caddy", want("an error that names it", err != nil && strings.Contains(string(out), "conflicts with caddy"), true))
}

// The tags of an rpm's header that the test reads, and the flags of a config file that upgrades keep.
const (
	rpmFileFlags  = 1037
	rpmProvides   = 1047
	rpmConflicts  = 1054
	rpmDirIndexes = 1116
	rpmBaseNames  = 1117
	rpmDirNames   = 1118
	rpmConfig     = 1 | 16
)

// inRPM checks the files of an rpm, and what it says about Caddy's own package.
func inRPM(t *testing.T, file string) {
	t.Helper()
	text, err := os.ReadFile(file)
	must(t, "read", err)
	// A lead of 96 bytes, the signature, and the header at a multiple of eight.
	const lead = 96
	signature := lead + rpmHeaderLength(text[lead:])
	header := text[(signature+7)/8*8:]
	index, dirs := rpmNumbers(header, rpmDirIndexes), rpmTexts(header, rpmDirNames)
	flags := rpmNumbers(header, rpmFileFlags)
	var found, kept []string
	for i, name := range rpmTexts(header, rpmBaseNames) {
		found = append(found, dirs[index[i]]+name)
		if flags[i]&rpmConfig == rpmConfig {
			kept = append(kept, found[i])
		}
	}
	slices.Sort(found)
	must(t, filepath.Base(file), errors.Join(
		want("files", strings.Join(found, " "), strings.Join(packaged, " ")),
		want("files that upgrades keep", strings.Join(kept, " "), "/etc/caddy/Caddyfile"),
		want("conflicts", strings.Join(rpmTexts(header, rpmConflicts), " "), "caddy"),
		want("providing caddy", slices.Contains(rpmTexts(header, rpmProvides), "caddy"), true),
	))
}

// rpmHeaderLength returns the length of a header: 16 bytes, an index of 16 bytes each, the content.
func rpmHeaderLength(header []byte) int {
	return 16 + 16*be(header[8:]) + be(header[12:])
}

// rpmValue returns what follows the beginning of a tag's value, and the number of its items.
func rpmValue(header []byte, tag int) (value []byte, items int) {
	entries := be(header[8:])
	for i := range entries {
		if entry := header[16+16*i:]; be(entry) == tag {
			return header[16+16*entries+be(entry[8:]):], be(entry[12:])
		}
	}
	return nil, 0
}

func rpmTexts(header []byte, tag int) (texts []string) {
	value, items := rpmValue(header, tag)
	for range items {
		text, rest, _ := bytes.Cut(value, []byte{0})
		texts, value = append(texts, string(text)), rest
	}
	return texts
}

func rpmNumbers(header []byte, tag int) (numbers []int) {
	value, items := rpmValue(header, tag)
	for i := range items {
		numbers = append(numbers, be(value[4*i:]))
	}
	return numbers
}

// be returns the number in the first four bytes.
func be(b []byte) int { return int(binary.BigEndian.Uint32(b)) }
