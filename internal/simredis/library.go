package simredis

import (
	"crypto/sha1"
	"encoding/binary"
	"encoding/hex"
	"math"
	"strconv"
	"strings"

	lua "github.com/yuin/gopher-lua"
)

// openLibraries adds what scripts find in Redis.
func (in *Interpreter) openLibraries() {
	L := in.state
	L.SetGlobal("redis", L.SetFuncs(L.NewTable(), map[string]lua.LGFunction{
		"call": in.call, "pcall": in.pcall, "acl_check_cmd": checkACL,
		"error_reply": replyError, "status_reply": replyStatus, "sha1hex": digest,
	}))
	L.SetGlobal("struct", L.SetFuncs(L.NewTable(), map[string]lua.LGFunction{"pack": pack, "unpack": unpack}))
	L.SetGlobal("pcall", L.NewFunction(protect))
	// That of gopher-lua takes 1e+16 for no number.
	L.SetGlobal("tonumber", L.NewFunction(toNumber))
	guards := L.SetFuncs(L.NewTable(), map[string]lua.LGFunction{"__index": refuseReading, "__newindex": refuseWriting})
	L.G.Global.Metatable = guards
}

func refuseReading(L *lua.LState) int {
	L.RaiseError("Script attempted to access nonexistent global variable '%s'", L.ToString(2))
	return 0
}

func refuseWriting(L *lua.LState) int {
	L.RaiseError("Attempt to modify a readonly table")
	return 0
}

// call is redis.call: an error of the command is one of the script.
func (in *Interpreter) call(L *lua.LState) int {
	reply, err := in.invoke(L)
	if err != nil {
		L.Error(errorTable(L, err), 0)
	}
	L.Push(toLua(L, reply))
	return 1
}

// pcall is redis.pcall: an error of the command is a reply.
func (in *Interpreter) pcall(L *lua.LState) int {
	reply, err := in.invoke(L)
	if err != nil {
		L.Push(errorTable(L, err))
		return 1
	}
	L.Push(toLua(L, reply))
	return 1
}

// invoke runs the command that the script calls.
func (in *Interpreter) invoke(L *lua.LState) (reply any, err error) {
	args := make([]string, L.GetTop())
	for i := range args {
		switch value := L.Get(i + 1).(type) {
		case lua.LString:
			args[i] = string(value)
		case lua.LNumber:
			args[i] = formatFloat(float64(value))
		default:
			return nil, Error("ERR Lua redis lib command arguments must be strings or integers")
		}
	}
	if len(args) == 0 {
		return nil, Error("ERR Please specify at least one argument for this redis lib call")
	}
	c := commandOf(args[0])
	switch {
	case c == nil:
		return nil, Error("ERR Unknown Redis command called from script")
	case !c.takes(len(args)):
		return nil, Error("ERR Wrong number of args calling Redis command from script")
	case c.writes && in.readOnly:
		return nil, errMayNotWrite
	case c.writes && in.server.primary != nil:
		return nil, errReadOnly
	}
	return c.run(in.server, args)
}

// errorTable is an error as scripts see it.
func errorTable(L *lua.LState, err error) *lua.LTable {
	t := L.CreateTable(0, 3)
	t.RawSetString("err", lua.LString(err.Error()))
	if source, rest, found := strings.Cut(L.Where(1), ":"); found {
		t.RawSetString("source", lua.LString("@"+source))
		t.RawSetString("line", lua.LString(strings.TrimSuffix(rest, ":")))
	}
	return t
}

// protect is Lua's pcall, but for the errors of redis.call it returns the text, as Redis does
// for scripts from the time when these errors were texts.
func protect(L *lua.LState) int {
	L.CheckAny(1)
	if err := L.PCall(L.GetTop()-1, lua.MultRet, nil); err != nil {
		L.SetTop(0)
		L.Push(lua.LFalse)
		failure, isFailure := err.(*lua.ApiError) //nolint:errorlint // gopher-lua returns it as it is.
		if !isFailure {
			L.Push(lua.LString(err.Error()))
			return 2
		}
		value := failure.Object
		if t, isTable := value.(*lua.LTable); isTable {
			if text, isText := t.RawGetString("err").(lua.LString); isText {
				value = text
			}
		}
		L.Push(value)
		return 2
	}
	L.Insert(lua.LTrue, 1)
	return L.GetTop()
}

// toNumber is Lua's tonumber; with a base, of digits alone.
func toNumber(L *lua.LState) int {
	if base := L.OptInt(2, 10); base != 10 {
		if number, err := strconv.ParseUint(L.CheckString(1), base, 64); err == nil {
			L.Push(lua.LNumber(number))
			return 1
		}
		L.Push(lua.LNil)
		return 1
	}
	switch value := L.CheckAny(1).(type) {
	case lua.LNumber:
		L.Push(value)
		return 1
	case lua.LString:
		if number, isNumber := parseNumber(strings.TrimSpace(string(value))); isNumber {
			L.Push(lua.LNumber(number))
			return 1
		}
	}
	L.Push(lua.LNil)
	return 1
}

// parseNumber is C's strtod, for which whole numbers can be hexadecimal.
func parseNumber(text string) (float64, bool) {
	if strings.Contains(text, "_") {
		return 0, false
	}
	if digits, isHex := strings.CutPrefix(strings.ToLower(text), "0x"); isHex {
		n, err := strconv.ParseUint(digits, 16, 64)
		return float64(n), err == nil
	}
	f, err := strconv.ParseFloat(text, 64)
	return f, err == nil || math.IsInf(f, 0)
}

// checkACL allows every command that there is.
func checkACL(L *lua.LState) int {
	if commandOf(L.CheckString(1)) == nil {
		L.Error(errorTable(L, Error("ERR Invalid command passed to redis.acl_check_cmd()")), 0)
	}
	L.Push(lua.LTrue)
	return 1
}

// digest is redis.sha1hex.
func digest(L *lua.LState) int {
	sum := sha1.Sum([]byte(lua.LVAsString(L.Get(1))))
	L.Push(lua.LString(hex.EncodeToString(sum[:])))
	return 1
}

// replyError is redis.error_reply. Its text begins with a code, which follows a dash or not.
func replyError(L *lua.LState) int {
	code, text, found := strings.Cut(strings.TrimRight(strings.TrimPrefix(L.CheckString(1), "-"), "\r\n"), " ")
	if !found {
		code, text = "ERR", code
	}
	t := L.CreateTable(0, 1)
	t.RawSetString("err", lua.LString(code+" "+text))
	L.Push(t)
	return 1
}

// replyStatus is redis.status_reply.
func replyStatus(L *lua.LState) int {
	t := L.CreateTable(0, 1)
	t.RawSetString("ok", lua.LString(L.CheckString(1)))
	L.Push(t)
	return 1
}

// doubles returns how many numbers a format of struct means: only little-endian doubles are
// known.
func doubles(L *lua.LState) int {
	format := L.CheckString(1)
	count := len(format) - 1
	if format != "<"+strings.Repeat("d", max(count, 0)) {
		L.RaiseError("simredis: struct knows the formats <d, <dd and so on, and not '%s'", format)
	}
	return count
}

// pack is struct.pack.
func pack(L *lua.LState) int {
	count := doubles(L)
	packed := make([]byte, 0, 8*count)
	for i := range count {
		packed = binary.LittleEndian.AppendUint64(packed, math.Float64bits(float64(L.CheckNumber(i+2))))
	}
	L.Push(lua.LString(packed))
	return 1
}

// unpack is struct.unpack. What follows the numbers is the place of the next one.
func unpack(L *lua.LState) int {
	count, text, first := doubles(L), L.CheckString(2), L.OptInt(3, 1)-1
	if first < 0 || len(text)-first < 8*count {
		L.RaiseError("bad argument #2 to 'unpack' (data string too short)")
	}
	packed := text[first:]
	for i := range count {
		number := []byte(packed[8*i : 8*i+8])
		L.Push(lua.LNumber(math.Float64frombits(binary.LittleEndian.Uint64(number))))
	}
	L.Push(lua.LNumber(first + 8*count + 1))
	return count + 1
}

// toLua is a reply as scripts see it.
func toLua(L *lua.LState, reply any) lua.LValue {
	switch reply := reply.(type) {
	case int64:
		return lua.LNumber(reply)
	case string:
		return lua.LString(reply)
	case Status:
		t := L.CreateTable(0, 1)
		t.RawSetString("ok", lua.LString(reply))
		return t
	case []any:
		t := L.CreateTable(len(reply), 0)
		for _, one := range reply {
			t.Append(toLua(L, one))
		}
		return t
	}
	return lua.LFalse
}

// fromLua is the reply that Redis makes of what a script returns.
func fromLua(value lua.LValue) any {
	switch value := value.(type) {
	case lua.LNumber:
		return int64(value)
	case lua.LString:
		return string(value)
	case lua.LBool:
		if value {
			return int64(1)
		}
	case *lua.LTable:
		return fromTable(value)
	}
	return nil
}

func fromTable(t *lua.LTable) any {
	if text, isText := t.RawGetString("err").(lua.LString); isText {
		return Error(text)
	}
	if text, isText := t.RawGetString("ok").(lua.LString); isText {
		return Status(text)
	}
	// The list ends at the first nil.
	replies := []any{}
	for i := 1; ; i++ {
		value := t.RawGetInt(i)
		if value == lua.LNil {
			return replies
		}
		replies = append(replies, fromLua(value))
	}
}
