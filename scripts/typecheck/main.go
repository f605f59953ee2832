// Typecheck reports whether a module compiles for other systems. It type-checks the packages and
// tests of the current directory from source. Where go vet compiles all that they import, which
// takes minutes for each system, this takes seconds.
//
//	go run ./scripts/typecheck darwin windows
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
)

func main() {
	failed := false
	for _, system := range os.Args[1:] {
		if err := check(system); err != nil {
			failed = true
			fmt.Fprintf(os.Stderr, "%s: %v\n", system, err)
		}
	}
	if failed {
		os.Exit(1)
	}
}

// pkg is what go list says about a package.
type pkg struct {
	ImportPath string
	Dir        string
	GoFiles    []string
	ImportMap  map[string]string // from import path to ImportPath
	DepOnly    bool              // whether the package is only imported
	Module     struct{ GoVersion string }
	Error      *struct{ Err string }
}

// check type-checks all packages for a system, and returns an error with a line for each of theirs.
func check(system string) error {
	list := exec.Command("go", "list", "-e", "-deps", "-test", "-json=ImportPath,Dir,GoFiles,ImportMap,DepOnly,Module,Error", "./...")
	list.Env = append(os.Environ(), "GOOS="+system, "CGO_ENABLED=0")
	list.Stderr = os.Stderr
	out, err := list.StdoutPipe()
	if err != nil {
		return err
	}
	if err := list.Start(); err != nil {
		return err
	}
	c := checker{fset: token.NewFileSet(), known: map[string]*types.Package{"unsafe": types.Unsafe}}
	// go list names a package after those that it imports.
	for decoder := json.NewDecoder(out); ; {
		var p pkg
		if err := decoder.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return err
		}
		c.add(p)
	}
	if err := list.Wait(); err != nil {
		return fmt.Errorf("go list: %w", err)
	}
	return errors.Join(c.errs...)
}

type checker struct {
	fset  *token.FileSet
	known map[string]*types.Package // by ImportPath
	errs  []error
}

// add checks a package. Of those that are only imported it reads the declarations, and it believes
// that they compile.
func (c *checker) add(p pkg) {
	if p.ImportPath == "unsafe" || strings.HasSuffix(p.ImportPath, ".test") {
		return
	}
	report := func(err error) {
		if !p.DepOnly {
			c.errs = append(c.errs, err)
		}
	}
	if p.Error != nil {
		report(errors.New(p.Error.Err))
	}
	var files []*ast.File
	for _, name := range p.GoFiles {
		file, err := parser.ParseFile(c.fset, filepath.Join(p.Dir, name), nil, parser.SkipObjectResolution)
		if err != nil {
			report(err)
			continue
		}
		files = append(files, file)
	}
	config := types.Config{
		Importer: importer(func(path string) (*types.Package, error) {
			if mapped, ok := p.ImportMap[path]; ok {
				path = mapped
			}
			if found := c.known[path]; found != nil {
				return found, nil
			}
			return nil, fmt.Errorf("no package %s", path)
		}),
		IgnoreFuncBodies: p.DepOnly,
		FakeImportC:      true,
		Error:            report,
		Sizes:            types.SizesFor("gc", runtime.GOARCH),
	}
	if p.Module.GoVersion != "" {
		config.GoVersion = "go" + p.Module.GoVersion
	}
	path, _, _ := strings.Cut(p.ImportPath, " ")
	// Errors have been reported.
	c.known[p.ImportPath], _ = config.Check(path, c.fset, files, nil)
}

type importer func(path string) (*types.Package, error)

func (i importer) Import(path string) (*types.Package, error) { return i(path) }
