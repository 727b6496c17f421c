/*
 * A boot sector that says on the serial port which PCI functions it sees (buses 0 to 7), then halts:
 * the smallest guest that proves a device arrived.
 */
	.code16
	.globl	_start
_start:
	xorw	%ax, %ax
	movw	%ax, %ds
	movw	%ax, %ss
	movw	$0x7c00, %sp
	movw	$start, %si
	call	print
	xorl	%ebx, %ebx		/* ebx: bus << 8 | device << 3 | function */
next:
	xorl	%eax, %eax
	call	config			/* vendor and device */
	cmpw	$0xffff, %ax
	je	absent
	movl	%eax, %ebp
	movw	$function, %si
	call	print
	movw	%bp, %ax
	call	hex
	movb	$':', %al
	call	putc
	movl	%ebp, %eax
	shrl	$16, %eax
	call	hex
	movw	$at, %si
	call	print
	movw	%bx, %ax
	call	hex
	movb	$'\n', %al
	call	putc
absent:
	incw	%bx
	cmpw	$0x800, %bx
	jb	next
	movw	$done, %si
	call	print
halt:
	hlt
	jmp	halt

config:				/* eax: register; answers in eax */
	movl	%ebx, %ecx
	shll	$8, %ecx
	orl	%ecx, %eax
	orl	$0x80000000, %eax
	movw	$0xcf8, %dx
	outl	%eax, %dx
	movw	$0xcfc, %dx
	inl	%dx, %eax
	ret

print:				/* si: text up to a zero */
	lodsb
	testb	%al, %al
	jz	1f
	call	putc
	jmp	print
1:	ret

hex:				/* ax, as four digits */
	movw	$4, %cx
1:	rolw	$4, %ax
	pushw	%ax
	andb	$15, %al
	cmpb	$10, %al
	sbbb	$0x69, %al
	das
	orb	$0x20, %al		/* lower case; digits have the bit already */
	call	putc
	popw	%ax
	loop	1b
	ret

putc:				/* al, on COM1 */
	pushw	%ax
	movw	$0x3fd, %dx
1:	inb	%dx, %al
	testb	$0x20, %al
	jz	1b
	popw	%ax
	movw	$0x3f8, %dx
	outb	%al, %dx
	ret

start:		.asciz	"GUEST-START report\n"
function:	.asciz	"GUEST-PCI "
at:		.asciz	" at "
done:		.asciz	"GUEST-DONE\n"
	.org	510
	.word	0xaa55
