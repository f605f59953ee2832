package store

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Record is a small value that processes share under an ID, and that one of them has to deal with
// when it is due: such as a reservation, which somebody gives back if nobody ends it.
type Record struct {
	// ID is that of the record, by any bytes. Of records whose IDs agree in a first line, new ones may
	// take at most MaxShare times the room that is left. Beside a Shard it may be the form in which the
	// store keeps it, which identifies the record too.
	ID string
	// Shard is where a record was found; empty where the ID decides.
	Shard string
	// Value is empty if there is no record.
	Value string
	// Version differs between different values of an ID; it is empty without a value.
	Version string
	// Left is how long until the record is due, by the store's clock; not above 0 once it is.
	Left time.Duration
	// Now is when the store has answered, by its clock, in microseconds since the epoch.
	Now int64
}

const (
	// MaxRecord is the most bytes of a value.
	MaxRecord = 16 << 10
	// MaxRecords is the most bytes that a store, or a shard of it, keeps of records, with 150 for
	// each beside ID and value.
	MaxRecords = 128 << 20
	// MaxShare bounds the room of records with a common first line, so that each leaves room to others: alone it
	// gets three quarters of all.
	MaxShare = 3
	// MaxRecordLeft is the longest time until a record is due.
	MaxRecordLeft = time.Hour
)

// Errors, possibly wrapped, of [Records.PutRecord].
var (
	// ErrRecordSize is the error of a value that is too large.
	ErrRecordSize = fmt.Errorf("%w: a record has at most %d bytes", ErrFinal, MaxRecord)
	// ErrRecordsFull is the error of a new record for which there is no room.
	ErrRecordsFull = fmt.Errorf("%w: the records of the shard, or those with the first line of this one, take as much of %d bytes as they may: wait until some have ended", ErrNotExecuted, MaxRecords)
)

// CheckRecord returns an error if r cannot be put.
func CheckRecord(r *Record) error {
	switch {
	case r.ID == "":
		return fmt.Errorf("%w: %w", ErrFinal, errors.New("a record needs an ID"))
	case len(r.Value) > MaxRecord:
		return fmt.Errorf("%w: it has %d", ErrRecordSize, len(r.Value))
	case r.Left < 0 || r.Left > MaxRecordLeft:
		return fmt.Errorf("%w: a record is due within %s, not %s", ErrFinal, MaxRecordLeft, r.Left)
	}
	return nil
}

// Records keep records, beside the buckets and as durably.
type Records interface {
	// Record returns what there is under an ID.
	Record(ctx context.Context, id string) (Record, error)
	// PutRecord puts a value in place of the one that has the version of r, empty if there is none, and
	// makes it due after Left. An empty value removes the record. It returns what is there then. The
	// error wraps ErrChanged if the version is another one, which is returned, and ErrNotExecuted if
	// the record certainly is as it was.
	PutRecord(ctx context.Context, r Record) (Record, error)
	// DueRecords returns records that are due, at most so many of each shard. For RecordPause they
	// are due for nobody else. It is an error if a shard does not answer; what is known is returned
	// with it.
	DueRecords(ctx context.Context, most int) ([]Record, error)
}

// RecordPause is how long whoever was told of a due record has it to itself.
const RecordPause = 5 * time.Second
