package docs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

const remedies = "docs/evidence/remedies.md"

// TestRemediesNameTheirTests checks that the table of remedies has each remedy in the code once, and no other, with
// the tests that apply it, or the word outside for what is done outside of Redis and Caddy.
func TestRemediesNameTheirTests(t *testing.T) {
	_, rest, _ := strings.Cut(read(t, remedies), "\n|---|---|---|\n")
	table, _, _ := strings.Cut(rest, "\n\n")
	defined, inCode, rows := definedTests(t), remediesInCode(t), map[string]bool{}
	for row := range strings.Lines(table) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(row), "| "), " | ")
		if len(cells) != 3 {
			t.Errorf("the table of remedies has the row %s", row)
			continue
		}
		remedy, tests := strings.Trim(cells[0], "`"), testName.FindAllString(cells[2], -1)
		if remedy = strings.ReplaceAll(remedy, `\|`, "|"); rows[remedy] || inCode[remedy] == "" {
			t.Errorf("it is not in the code, or twice in the table: %q", remedy)
		}
		rows[remedy] = true
		if len(tests) == 0 && !strings.HasPrefix(cells[2], "outside") {
			t.Errorf("no test applies %q", remedy)
		}
		for _, name := range tests {
			if run := defined[name]; len(run) != 1 || run[0] == "" {
				t.Errorf("%s runs by %q: name one that make test or make check runs, with a name of its own", name, run)
			}
		}
	}
	for remedy, place := range inCode {
		if !rows[remedy] {
			t.Errorf("%s: the table of remedies lacks %q", place, remedy)
		}
	}
	if len(rows) < 60 {
		t.Errorf("found %d remedies", len(rows))
	}
}

// named matches what is called a remedy in the code.
var named = regexp.MustCompile(`(?i)remed(y|ies)`)

// problemPackages have the remedies of problems, errors and findings. Errors of configs have tables of their own.
var problemPackages = []string{"internal/admin", "internal/memory", "internal/redis/ask", "internal/redis/operate", "internal/redis/wire", "internal/stores", "redisstore"}

// remediesInCode returns the places of remedies in the code: of texts that are given for a field, variable, parameter
// or key of that name, or that a function of that name returns, and of problems.
func remediesInCode(t *testing.T) map[string]string {
	t.Helper()
	found := map[string]string{}
	for _, folder := range problemPackages {
		s := scan{set: token.NewFileSet(), found: found, parameters: map[string]int{}}
		var files []*ast.File
		for _, path := range documents(t, folder+"/*.go") {
			if strings.HasSuffix(path, "_test.go") {
				continue
			}
			file, err := parser.ParseFile(s.set, path, nil, 0)
			must(t, path, err)
			files = append(files, file)
		}
		for _, visit := range []func(ast.Node) bool{s.declare, s.collect} {
			for _, file := range files {
				ast.Inspect(file, visit)
			}
		}
	}
	return found
}

// scan collects the remedies of a package. parameters has the places of those that are called remedy, by the names of
// functions.
type scan struct {
	set        *token.FileSet
	found      map[string]string
	parameters map[string]int
}

func (s *scan) declare(n ast.Node) bool {
	switch n := n.(type) {
	case *ast.FuncDecl:
		s.addFunction(n.Name.Name, n.Type)
	case *ast.AssignStmt:
		for i, right := range n.Rhs {
			if f, ok := right.(*ast.FuncLit); ok {
				s.addFunction(nameOf(n.Lhs[i]), f.Type)
			}
		}
	}
	return true
}

func (s *scan) addFunction(name string, f *ast.FuncType) {
	place := 0
	for _, field := range f.Params.List {
		for _, parameter := range field.Names {
			if parameter.Name == "remedy" {
				s.parameters[name] = place
			}
			place++
		}
	}
}

func (s *scan) collect(n ast.Node) bool {
	switch n := n.(type) {
	case *ast.KeyValueExpr:
		s.addIf(named.MatchString(nameOf(n.Key)), n.Value)
	case *ast.AssignStmt:
		for i, right := range n.Rhs {
			s.addIf(named.MatchString(nameOf(n.Lhs[min(i, len(n.Lhs)-1)])), right)
		}
	case *ast.ValueSpec:
		for i, value := range n.Values {
			s.addIf(named.MatchString(n.Names[i].Name), value)
		}
	case *ast.FuncDecl:
		if n.Body != nil && named.MatchString(n.Name.Name) {
			ast.Inspect(n.Body, func(n ast.Node) bool {
				if r, ok := n.(*ast.ReturnStmt); ok && len(r.Results) > 0 {
					s.addIf(true, r.Results...)
				}
				return true
			})
		}
	case *ast.CallExpr:
		if place, ok := s.parameters[nameOf(n.Fun)]; ok && place < len(n.Args) {
			s.addIf(true, n.Args[place])
		}
		isOfProblem := len(n.Args) > 0 && strings.HasPrefix(nameOf(n.Args[0]), "Problem")
		isOfLog := len(n.Args) == 2 && nameOf(n.Fun) == "String" && named.MatchString(textOf(n.Args[0]))
		s.addIf(isOfLog, n.Args...)
		if isOfProblem {
			s.addEnds(n.Args)
		}
	}
	return true
}

// addIf adds the texts in expressions that have more than one word.
func (s *scan) addIf(isRemedy bool, expressions ...ast.Expr) {
	if !isRemedy {
		return
	}
	for _, expression := range expressions {
		ast.Inspect(expression, func(n ast.Node) bool {
			if _, isFunction := n.(*ast.FuncLit); isFunction {
				return false
			}
			if literal, ok := n.(ast.Expr); ok {
				if text := strings.Trim(textOf(literal), ":; "); strings.Contains(text, " ") {
					s.add(text, literal)
				}
			}
			return true
		})
	}
}

// addEnds adds what the texts of a problem have after their last colon, unless it is given elsewhere.
func (s *scan) addEnds(arguments []ast.Expr) {
	for _, argument := range arguments {
		text := textOf(argument)
		if i := strings.LastIndex(text, ": "); i >= 0 && !strings.HasPrefix(text[i+2:], "%") {
			s.add(text[i+2:], argument)
		}
	}
}

func (s *scan) add(text string, e ast.Expr) {
	at := s.set.Position(e.Pos())
	s.found[text] = filepath.ToSlash(at.Filename) + ":" + strconv.Itoa(at.Line)
}

// textOf returns the text of a literal, or "".
func textOf(e ast.Expr) string {
	literal, ok := e.(*ast.BasicLit)
	if !ok || literal.Kind != token.STRING {
		return ""
	}
	text, _ := strconv.Unquote(literal.Value)
	return text
}

// nameOf returns the last name of an expression, or "".
func nameOf(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.SelectorExpr:
		return e.Sel.Name
	}
	return ""
}
