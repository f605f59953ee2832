package main

import (
	"bytes"
	"cmp"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path"
	"slices"
	"strings"
)

// kind is the purpose of a file.
type kind int

const (
	product kind = iota
	tests
	support    // programs and packages that tests and builds use
	laboratory // measuring programs, and their tests
	other      // the product's files in other languages
	kinds
)

// supporting are the folders that only tests, builds and the laboratory use.
var supporting = []string{
	"e2e", "scripts", "internal/adversary", "internal/caddyproc", "internal/caddytest", "internal/loadgen", "internal/process",
	"internal/redistest", "internal/simredis", "internal/simstore", "internal/simulation",
	"internal/storetest", "internal/sweep",
}

// project has the figures of the document.
type project struct {
	lines     [kinds]int
	byPackage map[string]int
	options   int
	exported  int // at the top level of packages outside internal/
	methods   int // of exported types there
	functions []function
	words     int
}

// function is a function of the product, and the mechanisms that it names.
type function struct {
	name       string
	mechanisms []string
}

// read reads the files of a checkout that git does not ignore, so that build results do not count.
func read(root string) (*project, error) {
	cmd := exec.Command("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
	cmd.Dir = root
	listed, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("list files: %w", err)
	}
	p := &project{byPackage: map[string]int{}}
	for name := range strings.SplitSeq(strings.TrimSuffix(string(listed), "\x00"), "\x00") {
		text, err := os.ReadFile(path.Join(root, name))
		if os.IsNotExist(err) {
			continue // removed, and not committed yet
		}
		if err != nil {
			return nil, err
		}
		if err := p.add(name, text); err != nil {
			return nil, err
		}
	}
	return p, nil
}

func (p *project) add(name string, text []byte) error {
	lines := bytes.Count(text, []byte("\n"))
	switch path.Ext(name) {
	case ".md":
		if name != document {
			p.words += len(bytes.Fields(text))
		}
	case ".lua", ".js", ".css", ".html":
		if kindOf(name) == product {
			p.lines[other] += lines
		}
	case ".go":
		file, err := parser.ParseFile(token.NewFileSet(), name, text, parser.ParseComments)
		if err != nil {
			return err
		}
		if ast.IsGenerated(file) {
			return nil
		}
		k := kindOf(name)
		p.lines[k] += lines
		if k == product {
			p.addSource(path.Dir(name), lines, file)
		}
	}
	return nil
}

func kindOf(name string) kind {
	in := func(folder string) bool { return strings.HasPrefix(name, folder+"/") }
	switch {
	case in("lab"):
		return laboratory
	case strings.HasSuffix(name, "_test.go"), strings.Contains(name, "testdata/"):
		return tests
	case slices.ContainsFunc(supporting, in):
		return support
	}
	return product
}

func (p *project) addSource(folder string, lines int, file *ast.File) {
	p.byPackage[folder] += lines
	for _, decl := range file.Decls {
		if !strings.Contains("/"+folder+"/", "/internal/") {
			names, methods := exported(decl)
			p.exported += names
			p.methods += methods
		}
		if f, ok := decl.(*ast.FuncDecl); ok {
			p.functions = append(p.functions, function{strings.TrimPrefix(folder+"."+nameOf(f), ".."), mechanismsOf(f)})
		}
	}
	ast.Inspect(file, func(n ast.Node) bool {
		if literal, ok := n.(*ast.CompositeLit); ok {
			p.options += rows(literal)
		}
		return true
	})
}

// rows returns how many named options a literal of a table lists.
func rows(literal *ast.CompositeLit) (n int) {
	list, ok := literal.Type.(*ast.ArrayType)
	if !ok || !isRow(list.Elt) {
		return 0
	}
	for _, element := range literal.Elts {
		row, ok := element.(*ast.CompositeLit)
		if !ok {
			continue
		}
		for _, field := range row.Elts {
			if pair, ok := field.(*ast.KeyValueExpr); ok && fmt.Sprint(pair.Key) == "Name" {
				n++
			}
		}
	}
	return n
}

func isRow(of ast.Expr) bool {
	selector, ok := of.(*ast.SelectorExpr)
	return ok && selector.Sel.Name == "Row" && fmt.Sprint(selector.X) == "option"
}

// exported returns how many names a declaration exports, and whether it is a method that does.
func exported(decl ast.Decl) (names, methods int) {
	switch decl := decl.(type) {
	case *ast.FuncDecl:
		switch {
		case !decl.Name.IsExported():
		case decl.Recv == nil:
			names++
		case ast.IsExported(receiver(decl)):
			methods++
		}
	case *ast.GenDecl:
		for _, spec := range decl.Specs {
			switch spec := spec.(type) {
			case *ast.TypeSpec:
				if spec.Name.IsExported() {
					names++
				}
			case *ast.ValueSpec:
				for _, name := range spec.Names {
					if name.IsExported() {
						names++
					}
				}
			}
		}
	}
	return names, methods
}

func nameOf(f *ast.FuncDecl) string {
	if f.Recv == nil {
		return f.Name.Name
	}
	return receiver(f) + "." + f.Name.Name
}

// receiver returns the name of a method's type.
func receiver(f *ast.FuncDecl) string {
	of := f.Recv.List[0].Type
	for {
		switch t := of.(type) {
		case *ast.StarExpr:
			of = t.X
		case *ast.IndexExpr:
			of = t.X
		case *ast.IndexListExpr:
			of = t.X
		case *ast.Ident:
			return t.Name
		default:
			return ""
		}
	}
}

// many is from how many mechanisms on a function is hard to change.
const many = 4

// naming returns how many functions name n mechanisms or more.
func (p *project) naming(n int) (found int) {
	for _, f := range p.functions {
		if len(f.mechanisms) >= n {
			found++
		}
	}
	return found
}

// packages returns the rows of the lines by package, the largest first.
func (p *project) packages() (rows [][]string) {
	names := make([]string, 0, len(p.byPackage))
	for name := range p.byPackage {
		names = append(names, name)
	}
	slices.SortFunc(names, func(a, b string) int {
		return cmp.Or(p.byPackage[b]-p.byPackage[a], strings.Compare(a, b))
	})
	for _, name := range names {
		rows = append(rows, []string{"`" + name + "`", count(p.byPackage[name])})
	}
	return rows
}

// worst returns the rows of the functions that name most mechanisms.
func (p *project) worst(n int) (rows [][]string) {
	slices.SortFunc(p.functions, func(a, b function) int {
		return cmp.Or(len(b.mechanisms)-len(a.mechanisms), strings.Compare(a.name, b.name))
	})
	for _, f := range p.functions[:min(n, len(p.functions))] {
		rows = append(rows, []string{"`" + f.name + "`", fmt.Sprint(len(f.mechanisms)), strings.Join(f.mechanisms, ", ")})
	}
	return rows
}
