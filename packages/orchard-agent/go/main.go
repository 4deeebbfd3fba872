// Command orchard-agent runs inside a sandbox and serves exec and files over HTTP/1.1 on any byte stream.
package main

import (
	"fmt"
	"os"
)

// version names the wire protocol and the agent; the client refuses another major.
const version = "1.0"

const usage = `usage: orchard-agent COMMAND [flags]
  serve          serve requests (-listen tcp:HOST:PORT | unix:PATH | fd:N | stdio)
  connect        join stdin and stdout to a running agent's socket (-to unix:PATH | tcp:HOST:PORT)
  enclose        make the namespaces and mounts of a local sandbox, then serve in them
  janitor        remove a client's sandbox folders once the client is gone
  version        print the version
`

func main() {
	command := ""
	if len(os.Args) > 1 {
		command = os.Args[1]
	}
	var err error
	switch command {
	case "serve":
		err = serveCommand(os.Args[2:])
	case "connect":
		err = connectCommand(os.Args[2:])
	case "enclose":
		err = encloseCommand(os.Args[2:])
	case "enclosed":
		err = enclosedCommand(os.Args[2:])
	case "limited":
		err = limitedCommand(os.Args[2:])
	case "janitor":
		err = janitorCommand(os.Args[2:])
	case "version":
		fmt.Println("orchard-agent", version)
	default:
		fmt.Fprint(os.Stderr, usage)
		os.Exit(2)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "orchard-agent "+command+":", err)
		os.Exit(1)
	}
}
