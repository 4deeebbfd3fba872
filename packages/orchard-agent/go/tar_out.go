package main

import (
	"archive/tar"
	"bufio"
	"errors"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"sort"
	"syscall"
)

const (
	reportTrailer = "X-Orchard-Report"
	errorTrailer  = "X-Orchard-Error"
)

func (s *server) tarOut(w http.ResponseWriter, r *http.Request) error {
	_, path, err := s.pathQuery(r)
	if err != nil {
		return err
	}
	folder, err := openDirectory(path)
	if err != nil {
		return err
	}
	folder.Close()
	root, err := os.OpenRoot(path)
	if err != nil {
		return err
	}
	defer root.Close()
	header := w.Header()
	header.Set("Content-Type", "application/x-tar")
	header.Set("Trailer", reportTrailer+", "+errorTrailer)
	// Without it each header would be a chunk of its own.
	out := bufio.NewWriterSize(w, copyBytes)
	packer := &packer{root: root, out: tar.NewWriter(out), buffer: make([]byte, copyBytes), linked: map[fileID]string{}}
	err = packer.folder(".")
	if err == nil {
		err = packer.out.Close()
	}
	if err == nil {
		err = out.Flush()
	}
	header.Set(reportTrailer, packer.report.header())
	if err != nil {
		header.Set(errorTrailer, quote(err.Error()))
	}
	return nil
}

type fileID struct{ device, inode uint64 }

// packer writes a folder as a tar. It never leaves the folder and never blocks on what isn't a regular file.
type packer struct {
	root   *os.Root
	out    *tar.Writer
	buffer []byte
	report tarReport
	linked map[fileID]string
}

func (p *packer) folder(name string) error {
	folder, err := p.root.OpenFile(name, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NONBLOCK, 0)
	if err != nil {
		p.report.skip(name, err.Error())
		return nil
	}
	names, err := folder.Readdirnames(-1)
	folder.Close()
	if err != nil {
		p.report.skip(name, err.Error())
		return nil
	}
	sort.Strings(names)
	for _, child := range names {
		if err := p.member(filepath.Join(name, child)); err != nil {
			return err
		}
	}
	return nil
}

// member packs one path; an error ends the whole archive, what can't be packed is skipped and listed.
func (p *packer) member(name string) error {
	info, err := p.root.Lstat(name)
	if err != nil {
		p.report.skip(name, err.Error())
		return nil
	}
	mode := info.Mode()
	header := &tar.Header{Name: name, Mode: int64(mode.Perm()), ModTime: info.ModTime(), Format: tar.FormatPAX}
	raw, _ := info.Sys().(*syscall.Stat_t)
	if raw != nil {
		header.Uid, header.Gid = int(raw.Uid), int(raw.Gid)
	}
	switch {
	case mode.IsDir():
		header.Typeflag, header.Name = tar.TypeDir, name+"/"
		if err := p.begin(header); err != nil {
			return err
		}
		return p.folder(name)
	case mode&fs.ModeSymlink != 0:
		header.Typeflag = tar.TypeSymlink
		if header.Linkname, err = p.root.Readlink(name); err != nil {
			p.report.skip(name, err.Error())
			return nil
		}
		return p.begin(header)
	case mode.IsRegular():
		if raw != nil && raw.Nlink > 1 {
			id := fileID{uint64(raw.Dev), raw.Ino}
			if first, ok := p.linked[id]; ok {
				header.Typeflag, header.Linkname = tar.TypeLink, first
				return p.begin(header)
			}
			if len(p.linked) < 1<<16 {
				p.linked[id] = name
			}
		}
		return p.file(name, header)
	}
	p.report.skip(name, "not a file, folder or link: "+mode.Type().String())
	return nil
}

func (p *packer) begin(header *tar.Header) error {
	if err := p.out.WriteHeader(header); err != nil {
		if errors.Is(err, tar.ErrHeader) {
			p.report.skip(header.Name, err.Error())
			return nil
		}
		return err
	}
	p.report.Delivered++
	return nil
}

func (p *packer) file(name string, header *tar.Header) error {
	file, err := p.root.OpenFile(name, syscall.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOFOLLOW, 0)
	if err != nil {
		p.report.skip(name, err.Error())
		return nil
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil || !info.Mode().IsRegular() {
		p.report.skip(name, "it changed while it was packed")
		return nil
	}
	header.Typeflag, header.Size = tar.TypeReg, info.Size()
	if err := p.begin(header); err != nil {
		return err
	}
	written, err := io.CopyBuffer(struct{ io.Writer }{p.out}, io.LimitReader(file, header.Size), p.buffer)
	if err == nil && written < header.Size {
		// The size is promised in the header: fill up, and say so.
		p.report.skip(name, "it shrank while it was packed; its end is zeros")
		clear(p.buffer)
		for written < header.Size && err == nil {
			var n int
			n, err = p.out.Write(p.buffer[:min(int64(len(p.buffer)), header.Size-written)])
			written += int64(n)
		}
	}
	return err
}
