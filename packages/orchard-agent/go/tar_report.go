package main

import (
	"encoding/json"
	"strings"
)

const (
	maxSkippedListed = 1000
	maxReportBytes   = 24 << 10
)

// tarReport says what a transfer did; names are quoted, for they may hold any bytes.
type tarReport struct {
	Delivered int         `json:"delivered"`
	Skipped   [][2]string `json:"skipped"`
	// More counts skipped members beyond those listed.
	More int `json:"more"`
}

func (t *tarReport) skip(name, reason string) {
	if len(t.Skipped) >= maxSkippedListed {
		t.More++
		return
	}
	t.Skipped = append(t.Skipped, [2]string{quote(name), reason})
}

// header is the report short enough for a trailer line.
func (t *tarReport) header() string {
	for {
		text, err := json.Marshal(t)
		if err != nil {
			return "{}"
		}
		if len(text) <= maxReportBytes {
			return strings.ReplaceAll(string(text), "\n", " ")
		}
		kept := len(t.Skipped) / 2
		t.More += len(t.Skipped) - kept
		t.Skipped = t.Skipped[:kept]
	}
}
