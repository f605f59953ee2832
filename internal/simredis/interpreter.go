package simredis

import (
	"crypto/sha1"
	"encoding/hex"
	"fmt"
	"strings"

	lua "github.com/yuin/gopher-lua"
)

// Interpreter compiles scripts, each of them once, and runs them for any number of servers,
// one after the other. It is not safe for concurrent use.
type Interpreter struct {
	state *lua.LState
	// byText and bySum have the same scripts.
	byText, bySum map[string]*script

	// server, script and readOnly are those of the call that runs.
	server   *Server
	script   *script
	readOnly bool
}

// script is a script that was compiled.
type script struct {
	sum  string
	main *lua.LFunction
}

// chunk is the name that Redis gives to each script.
const chunk = "user_script"

// NewInterpreter returns an interpreter without scripts.
func NewInterpreter() *Interpreter {
	in := &Interpreter{
		state:  lua.NewState(lua.Options{SkipOpenLibs: true}),
		byText: map[string]*script{}, bySum: map[string]*script{},
	}
	for name, open := range map[string]lua.LGFunction{
		lua.BaseLibName: lua.OpenBase, lua.TabLibName: lua.OpenTable, lua.StringLibName: lua.OpenString, lua.MathLibName: lua.OpenMath,
	} {
		in.state.Push(in.state.NewFunction(open))
		in.state.Push(lua.LString(name))
		in.state.Call(1, 0)
	}
	in.openLibraries()
	return in
}

// compile returns the script of a text.
func (in *Interpreter) compile(text string) (*script, error) {
	if sc := in.byText[text]; sc != nil {
		return sc, nil
	}
	main, err := in.state.Load(strings.NewReader(text), chunk)
	if err != nil {
		return nil, Error("ERR Error compiling script (new function): " + err.Error())
	}
	sum := sha1.Sum([]byte(text)) // Redis names scripts by their SHA-1.
	sc := &script{hex.EncodeToString(sum[:]), main}
	in.byText[text], in.bySum[sc.sum] = sc, sc
	return sc, nil
}

// run runs a script for a server.
func (in *Interpreter) run(s *Server, sc *script, readOnly bool, keys, args []string) (reply any, err error) {
	in.server, in.script, in.readOnly = s, sc, readOnly
	defer func() { in.server = nil }()
	globals := in.state.G.Global
	globals.RawSetString("KEYS", in.list(keys))
	globals.RawSetString("ARGV", in.list(args))
	in.state.Push(sc.main)
	if err := in.state.PCall(0, 1, nil); err != nil {
		return nil, in.uncaught(err)
	}
	value := in.state.Get(-1)
	in.state.Pop(1)
	reply = fromLua(value)
	if e, isError := reply.(Error); isError {
		return nil, e
	}
	return reply, nil
}

func (in *Interpreter) list(texts []string) *lua.LTable {
	list := in.state.CreateTable(len(texts), 0)
	for _, text := range texts {
		list.Append(lua.LString(text))
	}
	return list
}

// uncaught is the reply of a script that an error has ended.
func (in *Interpreter) uncaught(err error) Error {
	failure, isFailure := err.(*lua.ApiError) //nolint:errorlint // gopher-lua returns it as it is.
	if !isFailure {
		return Error("ERR " + err.Error())
	}
	text, line := "ERR "+failure.Object.String(), "-1"
	if t, isTable := failure.Object.(*lua.LTable); isTable {
		text, line = t.RawGetString("err").String(), t.RawGetString("line").String()
	} else if position, _, found := strings.Cut(strings.TrimPrefix(text, "ERR "+chunk+":"), ":"); found {
		line = position
	}
	return Error(fmt.Sprintf("%s script: %s, on @%s:%s.", text, in.script.sum, chunk, line))
}

// scriptCommandOf returns what runs or loads scripts under that name, or nil.
func scriptCommandOf(name string) func(s *Server, args []string) (any, error) {
	switch strings.ToUpper(name) {
	case "EVAL":
		return func(s *Server, args []string) (any, error) { return s.evalText(args, false) }
	case "EVAL_RO":
		return func(s *Server, args []string) (any, error) { return s.evalText(args, true) }
	case "EVALSHA":
		return func(s *Server, args []string) (any, error) { return s.evalSum(args, false) }
	case "EVALSHA_RO":
		return func(s *Server, args []string) (any, error) { return s.evalSum(args, true) }
	case "SCRIPT":
		return (*Server).loadScript
	}
	return nil
}

// Eval runs a script, as EVAL does. It returns what [Server.Do] does.
func (s *Server) Eval(text string, keys, args []string) (reply any, err error) {
	sc, err := s.load(text)
	if err != nil {
		return nil, err
	}
	return s.run(sc, false, keys, args)
}

// load makes a script known to EVALSHA.
func (s *Server) load(text string) (*script, error) {
	sc, err := s.interpreter.compile(text)
	if err == nil {
		s.scripts[sc.sum] = true
	}
	return sc, err
}

func (s *Server) run(sc *script, readOnly bool, keys, args []string) (any, error) {
	defer s.commit(s.begin())
	return s.interpreter.run(s, sc, readOnly, keys, args)
}

func (s *Server) evalText(args []string, readOnly bool) (any, error) {
	keys, rest, err := splitKeys(args)
	if err != nil {
		return nil, err
	}
	sc, err := s.load(args[1])
	if err != nil {
		return nil, err
	}
	return s.run(sc, readOnly, keys, rest)
}

func (s *Server) evalSum(args []string, readOnly bool) (any, error) {
	keys, rest, err := splitKeys(args)
	if err != nil {
		return nil, err
	}
	sum := strings.ToLower(args[1])
	if !s.scripts[sum] {
		return nil, errNoScript
	}
	return s.run(s.interpreter.bySum[sum], readOnly, keys, rest)
}

// splitKeys returns the keys and the arguments of EVAL and its variants.
func splitKeys(args []string) (keys, rest []string, err error) {
	if len(args) < 3 {
		return nil, nil, errArity(args[0])
	}
	n, err := parseInteger(args[2])
	switch {
	case err != nil:
		return nil, nil, err
	case n > int64(len(args)-3):
		return nil, nil, errManyKeys
	case n < 0:
		return nil, nil, errFewKeys
	}
	return args[3 : 3+n], args[3+n:], nil
}

// loadScript is SCRIPT LOAD.
func (s *Server) loadScript(args []string) (any, error) {
	if len(args) != 3 || !strings.EqualFold(args[1], "LOAD") {
		return nil, errUnknown(args)
	}
	sc, err := s.load(args[2])
	if err != nil {
		return nil, err
	}
	return sc.sum, nil
}
